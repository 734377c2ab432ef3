"""One place for lines that change, of several launches at once, and a last line for all of them."""

from __future__ import annotations

from collections.abc import Callable

from mlaunch.caller.output.console import Console
from mlaunch.caller.output.harmless import harmless
from mlaunch.caller.output.live import LiveLines
from mlaunch.display.caller.drawn_lines import Area


class SharedArea(Area):
    """``total``: makes the last line; ``since``: when the first launch began, in monotonic seconds.

    What methods return is to be written to stderr, as with any ``Area``.
    """

    def __init__(self, place: Area, total: Callable[[], str], since: float) -> None:
        self._place, self._total, self.since = place, total, since
        self._texts: dict[AreaPart, str] = {}
        self._shown = False

    @property
    def parts(self) -> int:
        """How many of its launches show something."""
        return len(self._texts)

    def part(self, number: int) -> AreaPart:
        """Return the place of one launch. ``number``: where among the others, whichever begins first."""
        return AreaPart(self, number)

    def take(self, part: AreaPart, text: str) -> str:
        """Takes what a launch shows."""
        self._texts[part] = text
        return self._show()

    def leave(self, part: AreaPart) -> str:
        """Shows nothing more of a launch."""
        self._texts.pop(part, None)
        return self._show() if self._texts else self._place.close([self._total()])

    def show(self, text: str) -> str:
        """Show lines that are no launch's."""
        return self._place.show(text)

    def hide(self) -> str:
        return self._place.hide()

    def close(self, lines: list[str]) -> str:
        return self._place.close(lines)

    def forget(self) -> None:
        self._place.forget()

    def settle(self) -> None:
        """Leaves of all of it what should stay, once the launches are over."""
        with LiveLines.lock, harmless():
            left = self._place.close([self._total()]) if self._shown and not self._texts else ""
            console = Console()
            console.write(2, left.encode())
            console.close()

    def _show(self) -> str:
        self._shown = True
        texts = [self._texts[part] for part in sorted(self._texts, key=lambda part: part.number)]
        return self._place.show("\n".join([*texts, self._total()]))


class AreaPart(Area):
    """The part of one launch. ``number``: its place among the others, whichever begins first."""

    def __init__(self, whole: SharedArea, number: int) -> None:
        self._whole, self.number = whole, number

    @property
    def whole(self) -> SharedArea:
        return self._whole

    def show(self, text: str) -> str:
        return self._whole.take(self, text)

    def hide(self) -> str:
        return self._whole.hide()

    def close(self, lines: list[str]) -> str:  # noqa: ARG002
        return self._whole.leave(self)

    def forget(self) -> None:
        self._whole.forget()
