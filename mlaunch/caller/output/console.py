"""Where people see what ranks print: this process's ``sys.stdout`` and ``sys.stderr`` of the moment.

So it arrives in the running cell of a notebook, and in what a test captures.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any


class Console:
    """Two streams. One that cannot be written to (a reader that left) is given up: that must not end a training."""

    def __init__(self) -> None:
        self._lost: set[int] = set()

    def write(self, stream: int, data: bytes) -> None:
        if stream in self._lost:
            return
        target: Any = sys.stdout if stream == 1 else sys.stderr
        try:
            raw = getattr(target, "buffer", None)
            if raw is None:  # a notebook's
                target.write(data.decode(errors="backslashreplace"))
            else:
                target.flush()
                raw.write(data)
            target.flush()
        except (AttributeError, OSError, ValueError):  # None, gone or full, closed
            self._lost.add(stream)

    def say(self, text: str) -> None:
        """A message of our own."""
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stderr.write(f"mlaunch: {text}\n")
            sys.stderr.flush()
