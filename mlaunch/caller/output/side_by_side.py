"""Tells launches of one process apart that run at the same time, in several threads."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import ClassVar


class Number:
    """A number that no other running launch of this process has, from 1, until it is given back."""

    number: int
    _lock = threading.Lock()
    _running: ClassVar[weakref.WeakSet[Number]] = weakref.WeakSet()

    def __init__(self) -> None:
        with self._lock:
            taken = {other.number for other in self._running}
            self.number = next(number for number in itertools.count(1) if number not in taken)
            self._running.add(self)

    def label(self, name: str = "") -> str:
        """Returns a launch's name with its number while another launch is running; "" while this is the only one."""
        return f"{name}#{self.number} " if len(self._running) > 1 else ""

    def give_back(self) -> None:
        """Gives the number back; may be called again."""
        with self._lock:
            self._running.discard(self)
