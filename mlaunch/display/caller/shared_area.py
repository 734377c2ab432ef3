"""A place for the changing lines of several launches at once, with a last line for all of them."""

from __future__ import annotations

from collections.abc import Callable

from mlaunch.caller.output.console import Console, LiveLines, harmless
from mlaunch.display.caller.areas import Area


class SharedArea(Area):
    """The shared place. ``total`` makes the last line; ``since``: the first launch's beginning, in monotonic seconds.

    Write what the methods return to stderr, as with any ``Area``.
    """

    def __init__(self, place: Area, total: Callable[[], str], since: float) -> None:
        self._place, self._total, self.since = place, total, since
        self._texts: dict[AreaPart, str] = {}
        self._shown = False

    @property
    def parts(self) -> int:
        """The number of its launches that show something."""
        return len(self._texts)

    def part(self, number: int) -> AreaPart:
        """Return the place of one launch. ``number``: its position, whichever launch begins first."""
        return AreaPart(self, number)

    def take(self, part: AreaPart, text: str) -> str:
        """Show the lines of a launch."""
        self._texts[part] = text
        return self._show()

    def leave(self, part: AreaPart) -> str:
        """Remove the lines of a launch."""
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
        """Draw the final state, after all launches."""
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
    """The place of one launch. ``number``: its position, whichever launch begins first."""

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
