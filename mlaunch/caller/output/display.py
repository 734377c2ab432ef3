"""The lines that change while a launch runs: what it is doing, and ranks' progress bars.

On a terminal they stand below what is printed (rich draws them), in a notebook at the top of the cell's output.
Elsewhere, without rich on a terminal, or with a pipe for stdout, there are none.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import stat
import sys
import threading
import time
from types import FrameType
from typing import Any, Protocol

from mlaunch.base.fds import renewed
from mlaunch.base.log import log
from mlaunch.caller.output.console import Console
from mlaunch.caller.output.harmless import harmless
from mlaunch.caller.report import notebook

SILENCE = 2.0  # seconds of a wait that the log does not tell of
_FIRST_LOOK_DELAY = 0.5  # seconds until the first look: a quick call shows nothing
_NO_CI = {"", "0", "false", "no"}  # values of the variable CI, which all of the usual services set
_PERIOD = 0.1  # seconds between two looks
_NEW_LINE = "\r\x1b[2K"  # where the cursor is: what stands there was ours, if nobody has written since


class Area(Protocol):
    """Where lines can be replaced. What its methods return is to be written to stderr."""

    def show(self, text: str) -> str: ...

    def hide(self) -> str:
        """Makes room for what is printed."""

    def close(self, lines: list[str]) -> str:
        """Leaves of these what should stay."""

    def forget(self) -> None:
        """Begins anew: what was shown is gone."""


class _Paper(io.StringIO):
    """What rich takes for a terminal: nothing waits for the real one, and all that is printed goes one way."""

    def isatty(self) -> bool:
        return True

    def take(self) -> str:
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


class _Pauses:
    """How often this process has gone on after a stop (Ctrl-Z), as far as somebody watches."""

    def __init__(self) -> None:
        self.count = 0
        self._watchers: set[Terminal] = set()

    def watch(self, who: Terminal) -> None:
        """Begin to count; nothing outside of the main thread, or where the user has a handler of his own."""
        self._watchers.add(who)
        with contextlib.suppress(ValueError):
            if signal.getsignal(signal.SIGCONT) == signal.SIG_DFL:
                signal.signal(signal.SIGCONT, self._note)

    def leave(self, who: Terminal) -> None:
        """Put the handler back after the last one."""
        self._watchers.discard(who)
        with contextlib.suppress(ValueError):
            if not self._watchers and signal.getsignal(signal.SIGCONT) == self._note:
                signal.signal(signal.SIGCONT, signal.SIG_DFL)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1


_pauses = _Pauses()


class Terminal:
    """Needs rich.

    It sets nothing in the terminal that has to be set back (a hidden cursor): Ctrl-Z, Ctrl-\\ and most signals leave
    without a word to us. After a stop it draws below what is there, which is the shell's; in the background nothing.
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

        self._look_at_pauses()
        if _is_in_background():
            return self._paper.take()
        looks = Text(text, no_wrap=True, overflow="ellipsis")
        if self._live is None:
            _pauses.watch(self)
            self._live = Live(looks, console=self._console, auto_refresh=False, transient=True,
                              redirect_stdout=False, redirect_stderr=False)  # fmt: skip
            self._live.start(refresh=True)
        else:
            self._live.update(looks, refresh=True)
        return self._paper.take()

    def hide(self) -> str:
        self._look_at_pauses()
        if self._live is not None:
            self._live.stop()
        self._live = None
        return self._paper.take()

    def _look_at_pauses(self) -> None:
        """After a stop, leave what is drawn: what the shell has written since is below it."""
        if self._pauses == _pauses.count:
            return
        self._pauses = _pauses.count
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._paper.take()
            self._paper.write(_NEW_LINE)

    def close(self, lines: list[str]) -> str:
        """Leaves all but the first, which was of interest while it changed."""
        shown = self.hide()
        _pauses.leave(self)
        for line in lines[1:]:
            self._console.print(line, markup=False, highlight=False)
        return shown + self._paper.take()

    def forget(self) -> None:
        """Does nothing: nobody clears what is drawn here."""


def _is_in_background() -> bool:
    """True if the terminal is another job's: who typed ``&``, or Ctrl-Z and ``bg``, has a prompt there."""
    for fd in (2, 1):
        with contextlib.suppress(OSError):  # no terminal, or not that of this session
            return os.tcgetpgrp(fd) not in {0, os.getpgrp()}  # 0: of a namespace around this one, as under unshare
    return False


class Notebook:
    """An output of the running cell, replaced each time."""

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
        """Takes the place above the first line that is printed."""
        return "" if self._shown is not None else self.show("")

    def close(self, lines: list[str]) -> str:
        return self.show("\n".join(lines)) if self._shown is not None and lines else ""

    def forget(self) -> None:
        self._id, self._shown = os.urandom(16).hex(), None


def area(*, blocks: bool = True) -> Area | None:
    """Returns the place for changing lines that this process has; None if it has none.

    ``blocks``: the call waits for its ranks. Lines of one that does not would be drawn over the prompt of a terminal.
    """
    if notebook.is_here():
        return Notebook()
    with contextlib.suppress(AttributeError, ValueError, ImportError):
        has_prompt = hasattr(sys, "ps1") and not blocks
        if sys.stderr.isatty() and not _is_a_log() and not has_prompt and not is_piped(1):
            return Terminal()
    return None


def _is_a_log() -> bool:
    """True if what the terminal shows is kept as lines: it cannot change any, or it is the log of a CI's job."""
    return os.environ.get("TERM") == "dumb" or os.environ.get("CI", "").lower() not in _NO_CI


def is_piped(fd: int) -> bool:
    """True if a program reads what is written there, which may draw on the whole terminal, as ``less`` does."""
    with contextlib.suppress(OSError):
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    return False


class Display:
    """Draws the lines when they are due. ``start``: when the launch began, on the caller's clock.

    Of launches at the same time, in several threads, the first has the place, and those who have parts of the same one.
    One that finds it taken draws nothing, also later. Whoever prints makes room there. What methods return is to be
    written to stderr, by who holds ``lock``.
    """

    # Of all launches: two that draw at once would each move the other's cursor.
    lock = renewed(threading.RLock())
    _holder: Any = None  # an Area, or what launches share

    def __init__(self, place: Area | None, start: float) -> None:
        self._area = place
        self._whole: Any = getattr(place, "whole", place)
        since = getattr(self._whole, "since", start)
        self.due: float | None = None if place is None else since + _FIRST_LOOK_DELAY

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
        """Makes room for what is about to be printed."""
        with harmless():
            if self._area is not None:
                self._take_place()
            return str(Display._holder.hide()) if Display._holder is not None else ""
        Display._holder = None
        self.give_up()
        return ""

    def take_over(self) -> str:
        """Takes the place from who has it, whose lines are not shown any more."""
        holder, Display._holder = Display._holder, self._whole
        with harmless():
            return str(holder.hide()) if holder not in {None, self._whole} else ""
        return ""

    def forget(self) -> None:
        """Begins anew where somebody has cleared all output."""
        if Display._holder is not None:
            with harmless():
                Display._holder.forget()

    def close(self, lines: list[str]) -> str:
        area, self._area, self.due = self._area, None, None
        try:
            with harmless():
                return area.close(lines) if area is not None and Display._holder is self._whole else ""
            return ""
        finally:
            self._leave_place()

    def give_up(self) -> None:
        """Draws nothing more."""
        self._area = self.due = None
        self._leave_place()

    def _take_place(self) -> bool:
        if Display._holder is None:
            Display._holder = self._whole
        return Display._holder is self._whole

    def _leave_place(self) -> None:
        if Display._holder is self._whole and not getattr(self._whole, "parts", 0):
            Display._holder = None


class StartingLine:
    """Shows a line before there is a launch that could tell of itself: while torch is imported, devices are waited for.

    It is shown if it is asked to, until the block ends. ``place``: where lines change; None: nowhere.

    Not a contextlib context manager; see ``interrupts``.
    """

    def __init__(self, name: str, place: Area | None) -> None:
        self._name, self._place = name, place
        self._display = Display(place, time.monotonic())
        self._shown = self._logged = False

    def show(self) -> None:
        """Shows that the call has begun, and what it waits for."""
        self.tell(f"{self._name}  starting: importing torch")

    @property
    def silence(self) -> float:
        """Seconds before there is a word of a wait. The end of the call before is a short one, and no news in a log."""
        return 0.0 if self._place is not None else SILENCE

    def tell_wait(self, text: str) -> None:
        """Shows for what the call waits; once, in the log, where no lines change: it may be for hours."""
        if self._place is not None:
            self.tell(text)
        elif not self._logged:
            self._logged = True
            log.warning("%s", text)

    def tell(self, text: str) -> None:
        """Shows a text in the line's place."""
        with Display.lock:
            self._shown = True
            self._write(self._display.draw([text], time.monotonic()))

    def __enter__(self) -> StartingLine:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._shown:
            with Display.lock:
                self._write(self._display.close([f"{self._name}  failed"] if kind is not None else []))

    def _write(self, text: str) -> None:
        console = Console()
        console.write(2, text.encode())
        console.close()
