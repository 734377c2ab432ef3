"""When the thread that hears the machines of a launch must act though nothing has come."""

from __future__ import annotations

import math
import time


class Patience:
    """Of one launch, in seconds. ``patience``: that ranks may take to end, after which a machine that is said to be
    lost is. ``deadline``: after which what nobody reads holds up nothing any more; None: it does until the end."""

    def __init__(self, patience: float, deadline: float | None) -> None:
        self._patience = patience
        self._give_up_at = math.inf
        self._lift_at = math.inf if deadline is None else time.monotonic() + deadline

    def milliseconds(self, other: float) -> float | None:
        """Returns how long a poll may take, if something else is due at ``other``; None: for ever."""
        due = min(self._give_up_at, self._lift_at, other)
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
