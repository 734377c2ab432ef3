"""The lines of one launch that change, drawn when they are due in the place that all launches of a process share."""

from __future__ import annotations

from mlaunch.caller.output.harmless import harmless
from mlaunch.caller.output.live import LiveLines, LivePlace

_FIRST_LOOK_DELAY = 0.5  # seconds until the first look: a quick call shows nothing
_PERIOD = 0.1  # seconds between two looks


class Area(LivePlace):
    """Where lines can be replaced. What its methods return is to be written to stderr."""

    since: float | None = None  # when the first of its launches began, if it has several; monotonic seconds

    @property
    def parts(self) -> int:
        """How many of its launches show something, if it has several."""
        return 0

    @property
    def whole(self) -> Area:
        """What this is a part of."""
        return self

    def lines(self, start: float) -> DrawnLines:
        return DrawnLines(self, start)

    def show(self, text: str) -> str:
        raise NotImplementedError

    def hide(self) -> str:
        """Make room for what is printed."""
        raise NotImplementedError

    def close(self, lines: list[str]) -> str:
        """Leave of these what should stay."""
        raise NotImplementedError

    def forget(self) -> None:
        """Start again: what was shown is gone."""
        raise NotImplementedError


class DrawnLines(LiveLines):
    """Draws the lines when they are due. ``start``: when the launch began, on the caller's clock.

    Of launches at the same time, in several threads, the first has the place, and those who have parts of the same one.
    One that finds it taken draws nothing, also later. A launch that prints makes room there.
    """

    def __init__(self, place: Area, start: float) -> None:
        self._area: Area | None = place
        self._whole = place.whole
        self.due = (start if self._whole.since is None else self._whole.since) + _FIRST_LOOK_DELAY

    def draw(self, lines: list[str], now: float) -> str:
        with harmless():
            if self._area is not None and self._take_place():
                self.postpone(now)
                return self._area.show("\n".join(lines))
        self.give_up()
        return ""

    def postpone(self, now: float) -> None:
        self.due = now + _PERIOD

    def make_room(self) -> str:
        if self._area is not None:
            self._take_place()
        return super().make_room()

    def take_over(self) -> str:
        """Take the place from the launch that has it, whose lines are not shown any more."""
        holder, LiveLines.holder = LiveLines.holder, self._whole
        with harmless():
            return str(holder.hide()) if holder not in {None, self._whole} else ""
        return ""

    def close(self, lines: list[str]) -> str:
        area, self._area, self.due = self._area, None, None
        try:
            with harmless():
                return area.close(lines) if area is not None and LiveLines.holder is self._whole else ""
            return ""
        finally:
            self._leave_place()

    def give_up(self) -> None:
        self._area = self.due = None
        self._leave_place()

    def _take_place(self) -> bool:
        if LiveLines.holder is None:
            LiveLines.holder = self._whole
        return LiveLines.holder is self._whole

    def _leave_place(self) -> None:
        if LiveLines.holder is self._whole and not self._whole.parts:
            LiveLines.holder = None
