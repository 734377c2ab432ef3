"""Where lines can change while a launch runs: what it is doing, and ranks' progress bars.

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
from types import FrameType
from typing import Any

from mlaunch.caller.report import notebook
from mlaunch.display.caller.drawn_lines import Area

_NO_CI = {"", "0", "false", "no"}  # values of the variable CI, which all of the usual services set
_NEW_LINE = "\r\x1b[2K"  # where the cursor is: what stands there was ours, if nobody has written since


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


class Terminal(Area):
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


class Notebook(Area):
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
