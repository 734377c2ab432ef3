"""Places for lines that change while a launch runs: its status, and ranks' progress bars.

On a terminal they are below the output (rich draws them), in a notebook at the top of the cell's output. Elsewhere,
without rich on a terminal, or with a pipe as stdout, there are none. All launches of a process share one place.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import stat
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from mlaunch.caller.output.console import Console, LiveLines, LivePlace, harmless
from mlaunch.caller.report import notebook

_NO_CI = {"", "0", "false", "no"}  # values of the variable CI, which all of the usual services set
_NEW_LINE = "\r\x1b[2K"  # at the cursor: the line is ours, unless others have written since
_FIRST_DRAWN = 0.5  # seconds until lines are first drawn: a quick call shows nothing
_PERIOD = 0.1  # seconds between two drawings


class Area(LivePlace):
    """A place where lines can be replaced. Write what its methods return to stderr."""

    since: float | None = None  # the beginning of the first of several launches, in monotonic seconds

    @property
    def parts(self) -> int:
        """The number of its launches that show something, if it has several."""
        return 0

    @property
    def whole(self) -> Area:
        """The shared place that this is a part of; itself if it is not shared."""
        return self

    def lines(self, start: float) -> DrawnLines:
        return DrawnLines(self, start)

    def show(self, text: str) -> str:
        raise NotImplementedError

    def hide(self) -> str:
        """Make room for output."""
        raise NotImplementedError

    def close(self, lines: list[str]) -> str:
        """Draw the final state of these lines."""
        raise NotImplementedError

    def forget(self) -> None:
        """Note that the drawing is gone: begin a new one."""
        raise NotImplementedError


class DrawnLines(LiveLines):
    """The lines of a launch, drawn when they are due. ``start``: its beginning, on the caller's clock.

    Of simultaneous launches in several threads, the first has the place, with those that have parts of the same one.
    One that finds it taken never draws anything. A launch that prints makes room there.
    """

    def __init__(self, place: Area, start: float) -> None:
        self._area: Area | None = place
        self._whole = place.whole
        self.due = (start if self._whole.since is None else self._whole.since) + _FIRST_DRAWN

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
        """Take the place from the launch that has it, whose lines are no longer shown."""
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


class _Paper(io.StringIO):
    """A terminal for rich: drawing never waits for the real one, and all output goes one way."""

    def isatty(self) -> bool:
        return True

    def take(self) -> str:
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


class _Pauses:
    """The number of times that this process was continued after a stop (Ctrl-Z), while it is watched."""

    def __init__(self) -> None:
        self.count = 0
        self._watchers: set[Terminal] = set()

    def watch(self, who: Terminal) -> None:
        """Begin to count, unless this is not the main thread or the user has a handler."""
        self._watchers.add(who)
        with contextlib.suppress(ValueError):
            if signal.getsignal(signal.SIGCONT) == signal.SIG_DFL:
                signal.signal(signal.SIGCONT, self._note)

    def leave(self, who: Terminal) -> None:
        """Restore the handler once nobody watches."""
        self._watchers.discard(who)
        with contextlib.suppress(ValueError):
            if not self._watchers and signal.getsignal(signal.SIGCONT) == self._note:
                signal.signal(signal.SIGCONT, signal.SIG_DFL)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1


_pauses = _Pauses()


class Terminal(Area):
    """A terminal, drawn on with rich.

    It sets nothing in the terminal that has to be restored (a hidden cursor): Ctrl-Z, Ctrl-\\ and most signals stop or
    end the process without notice. After a stop it draws below the shell's output; in the background, nothing.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self._paper = _Paper()
        self._console = Console(file=self._paper)
        self._console.show_cursor = lambda show=True: not show  # type: ignore[method-assign]
        self._live: Any = None
        self._pauses = _pauses.count

    def show(self, text: str) -> str:
        from rich.live import Live
        from rich.text import Text

        self._leave_old_drawing()
        if _is_in_background():
            return self._paper.take()
        drawn = Text(text, no_wrap=True, overflow="ellipsis")
        if self._live is None:
            _pauses.watch(self)
            self._live = Live(drawn, console=self._console, auto_refresh=False, transient=True,
                              redirect_stdout=False, redirect_stderr=False)  # fmt: skip
            self._live.start(refresh=True)
        else:
            self._live.update(drawn, refresh=True)
        return self._paper.take()

    def hide(self) -> str:
        self._leave_old_drawing()
        if self._live is not None:
            self._live.stop()
        self._live = None
        return self._paper.take()

    def _leave_old_drawing(self) -> None:
        """After a stop, leave the drawing as it is: the shell has written below it."""
        if self._pauses == _pauses.count:
            return
        self._pauses = _pauses.count
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._paper.take()
            self._paper.write(_NEW_LINE)

    def close(self, lines: list[str]) -> str:
        """Leave all lines but the first, the status."""
        shown = self.hide()
        _pauses.leave(self)
        for line in lines[1:]:
            self._console.print(line, markup=False, highlight=False)
        return shown + self._paper.take()

    def forget(self) -> None:
        """Do nothing: a terminal's drawing is not cleared."""


def _is_in_background() -> bool:
    """True if another job has the terminal: after ``&``, or Ctrl-Z and ``bg``, it shows a prompt."""
    for fd in (2, 1):
        with contextlib.suppress(OSError):  # no terminal, or not that of this session
            return os.tcgetpgrp(fd) not in {0, os.getpgrp()}  # 0: in an outer namespace, as under unshare
    return False


class Notebook(Area):
    """An output of the running cell, which is replaced each time."""

    def __init__(self) -> None:
        self._id = os.urandom(16).hex()
        self._shown: str | None = None

    def show(self, text: str) -> str:
        import IPython.display

        display: Any = IPython.display.display  # untyped
        if text != self._shown:
            data = {"text/plain": text}
            display(data, raw=True, display_id=self._id, update=self._shown is not None)
        self._shown = text
        return ""

    def hide(self) -> str:
        """Take the place above the first line of output."""
        return "" if self._shown is not None else self.show("")

    def close(self, lines: list[str]) -> str:
        return self.show("\n".join(lines)) if self._shown is not None and lines else ""

    def forget(self) -> None:
        self._id, self._shown = os.urandom(16).hex(), None


def area(*, blocks: bool = True) -> Area | None:
    """Return this process's place for changing lines; None if it has none.

    ``blocks``: the call waits for its ranks. Otherwise its lines would be drawn over the prompt of a terminal.
    """
    if notebook.is_here():
        return Notebook()
    with contextlib.suppress(AttributeError, ValueError, ImportError):
        has_prompt = hasattr(sys, "ps1") and not blocks
        if sys.stderr.isatty() and not _is_a_log() and not has_prompt and not is_piped(1):
            return Terminal()
    return None


def _is_a_log() -> bool:
    """True if the terminal keeps all lines: it cannot change any, or it is the log of a CI job."""
    return os.environ.get("TERM") == "dumb" or os.environ.get("CI", "").lower() not in _NO_CI


def is_piped(fd: int) -> bool:
    """True if a program reads this descriptor. It may draw on the whole terminal, as ``less`` does."""
    with contextlib.suppress(OSError):
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    return False


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
