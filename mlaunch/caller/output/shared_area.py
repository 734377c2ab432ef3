"""One place for lines that change, of several launches at once, and a last line for all of them."""

from __future__ import annotations

from collections.abc import Callable

from mlaunch.caller.output.console import Console
from mlaunch.caller.output.display import Area, Display
from mlaunch.caller.output.harmless import harmless


class SharedArea:
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

    def take(self, part: AreaPart, text: str) -> str:
        """Takes what a launch shows."""
        self._texts[part] = text
        return self._show()

    def leave(self, part: AreaPart) -> str:
        """Shows nothing more of a launch."""
        self._texts.pop(part, None)
        return self._show() if self._texts else self._place.close([self._total()])

    def hide(self) -> str:
        """Makes room for what is printed."""
        return self._place.hide()

    def forget(self) -> None:
        """Begins anew: what was shown is gone."""
        self._place.forget()

    def settle(self) -> None:
        """Leaves of all of it what should stay, once the launches are over."""
        with Display.lock, harmless():
            left = self._place.close([self._total()]) if self._shown and not self._texts else ""
            console = Console()
            console.write(2, left.encode())
            console.close()

    def _show(self) -> str:
        self._shown = True
        texts = [self._texts[part] for part in sorted(self._texts, key=lambda part: part.number)]
        return self._place.show("\n".join([*texts, self._total()]))


class AreaPart:
    """The part of one launch. ``number``: its place among the others, whichever begins first."""

    def __init__(self, whole: SharedArea, number: int) -> None:
        self.whole, self.number = whole, number

    def show(self, text: str) -> str:
        return self.whole.take(self, text)

    def hide(self) -> str:
        return self.whole.hide()

    def close(self, _lines: list[str]) -> str:
        return self.whole.leave(self)

    def forget(self) -> None:
        self.whole.forget()
