"""A deadline that can be held, so that it does not come closer while somebody debugs."""

from __future__ import annotations

from dataclasses import dataclass

NEVER = float("inf")


@dataclass
class Deadline:
    """Times are in seconds, of its owner's monotonic clock. A deadline that was not started never passes."""

    due: float = NEVER  # when it passes; ``NEVER`` also while it is held
    _held: float | None = None  # seconds that are left, while it is held

    def start(self, seconds: float | None, now: float) -> Deadline:
        """Start counting, and return the deadline itself. ``seconds`` None: it never passes."""
        self.due, self._held = NEVER if seconds is None else now + seconds, None
        return self

    def bring_forward(self, due: float) -> None:
        """Make it pass at ``due`` at the latest, even while it is held."""
        self.due = min(self.due, due)

    def hold(self, now: float, *, held: bool) -> None:
        """Stop counting, or resume."""
        if held and self.due < NEVER:
            self._held, self.due = self.due - now, NEVER
        elif not held and self._held is not None:
            self.bring_forward(now + self._held)
            self._held = None

    def cancel(self) -> None:
        """Make it never pass."""
        self.due, self._held = NEVER, None
