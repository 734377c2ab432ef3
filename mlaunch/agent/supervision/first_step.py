"""When ranks are asked for their stacks, which is the first step of ending a call."""

from __future__ import annotations

from collections.abc import Callable

NEVER = float("inf")
END_DELAY = 2.0  # seconds in which a rank that is about to end may do so


class FirstStep:
    """Knows when the step is due: ``at``, by ``clock``.

    A failure that looks like the consequence of another rank's holds it for a moment. If a rank is about to end by
    then (``a_rank_ends``), that end is the cause, most likely, and is worth a longer wait, once: the kernel closes the
    connections of a process before it tells that the process has ended, and on a busy machine long before.
    """

    def __init__(self, clock: Callable[[], float], a_rank_ends: Callable[[], bool]) -> None:
        self._clock = clock
        self._a_rank_ends = a_rank_ends
        self.at = NEVER
        self._longer = END_DELAY

    def within(self, seconds: float) -> None:
        """Sets when it is due at the latest; 0.0: whatever a rank is about to do, as the cause is known."""
        self.at = min(self.at, self._clock() + seconds)
        self._longer = self._longer if seconds else 0.0

    def clear(self) -> None:
        """Sets that it is not due, as it was taken or has become needless."""
        self.at, self._longer = NEVER, END_DELAY

    def is_due(self) -> bool:
        """Tells whether it is due now; puts it off if a rank is about to end."""
        if self._clock() < self.at:
            return False
        if self._longer and self._a_rank_ends():
            self.at, self._longer = self._clock() + self._longer, 0.0
        return self._clock() >= self.at
