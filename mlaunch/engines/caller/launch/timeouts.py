"""The times at which the thread that hears the machines of a launch must act though nothing has come."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator

from mlaunch.engines.caller.launch.machine import Machine
from mlaunch.engines.caller.lease import interval
from mlaunch.protocol.messages import PartSays

EndOf = Callable[[Machine], tuple[str, str]]  # what the engine knows of it, and what its member wrote last
_MISSED = 2.5  # signs of life without an answer


class Patience:
    """The time limits of one launch, in seconds.

    ``patience``: to wait for a machine's ranks once another machine reports that machine lost. ``deadline``: after it,
    unread output no longer delays the launch; None: it does until the end. ``lease``: the engine's, which says how
    often machines are asked for an answer; None: they are not.
    """

    def __init__(self, patience: float, deadline: float | None, lease: float | None = None) -> None:
        self._patience = patience
        self._give_up_at = math.inf
        self._lift_at = math.inf if deadline is None else time.monotonic() + deadline
        self._silence = math.inf if lease is None else interval(lease) * _MISSED
        self._look_at = time.monotonic() + self._silence
        self._silent = set[int]()  # numbers of machines of which it was told

    def milliseconds(self, other: float) -> float | None:
        """Returns how long a poll may take, if something else is due at ``other``; None: for ever."""
        due = min(self._give_up_at, self._lift_at, self._look_at, other)
        return None if due == math.inf else 1000 * max(0.0, due - time.monotonic())

    def begin_to_give_up(self) -> None:
        """Notes that others say that a machine is lost."""
        self._give_up_at = min(self._give_up_at, time.monotonic() + self._patience)

    def take_due(self) -> tuple[bool, bool]:
        """Tells whether to give up, and whether the deadline has passed; each once."""
        now = time.monotonic()
        gives_up, lifts = now >= self._give_up_at, now >= self._lift_at
        self._give_up_at = math.inf if gives_up else self._give_up_at
        self._lift_at = math.inf if lifts else self._lift_at
        return gives_up, lifts

    def news(self, machines: Collection[Machine], end_of: EndOf) -> Iterator[PartSays]:
        """Yields what is to be told of machines that do not answer any more, of each once until it does."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + self._silence
        silent = [machine for machine in machines if machine.is_silent(self._silence)]
        for machine in silent:
            if machine.number not in self._silent:
                guess = f"is it cut off, or was its member stopped? kill -CONT {machine.pid} there continues that"
                why = end_of(machine)[0] or guess
                yield PartSays("engines", f"host {machine.host} has not answered for {self._silence:g} s: {why}")
        self._silent = {machine.number for machine in silent}
