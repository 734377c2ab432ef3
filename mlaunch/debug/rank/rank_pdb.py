"""Python's own debugger, with the launcher's frames left out, and with words for what ends a launch."""

from __future__ import annotations

import contextlib
import linecache
import os
import pdb
import sys
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from mlaunch.base.frames import innermost_users, is_bottom, is_ours
from mlaunch.debug.rank.talk import Talk
from mlaunch.debug.wire import Onward

_Stack = list[tuple[FrameType, int]]
_STEPS = {"next", "n", "step", "s", "until", "unt", "return", "r", "jump", "j", "continue", "cont", "c"}
_SEVERAL = """\
all COMMAND         gives a command to all ranks that have stopped ("all n")
ranks 1,3 COMMAND   gives it to some of them
switch 2            goes to the prompt of rank 2
who                 says where each rank is"""
_CONTEXT = 5  # lines of source, as IPython's debugger shows
_FAILED = "the function has failed here and cannot go on; look around, q ends the launch"


class RankPdb(pdb.Pdb):
    """A debugger of one thread of a rank. ``failed``: of an exception that nobody has caught."""

    def __init__(self, talk: Talk, *, failed: bool = False) -> None:
        with _without_readline():  # which would set up a terminal that this process has not
            file: Any = talk
            # nosigint: Ctrl-C is the caller's, who has the terminal; readrc: a .pdbrc could stop a rank that nobody
            # sees.
            super().__init__(stdin=file, stdout=file, skip=["mlaunch", "mlaunch.*"], nosigint=True, readrc=False)
        self._talk = talk
        self._failed = failed
        self.prompt = talk.prompt
        self.detached = False

    def interaction(self, frame: FrameType | None, *trace: Any) -> None:
        """Talks until the rank is to go on."""
        stack, index = self.get_stack(frame, _traceback_of(*trace))
        with self._talk.turn(place_of(stack[index][0], stack[index][1])):
            self._talk.how = Onward.STEPS
            super().interaction(frame, *trace)

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[_Stack, int]:
        """Returns the frames of the user and of libraries, and which is the present one: after a failure the user's."""
        stack, index = super().get_stack(f, t)
        files = [frame.f_code.co_filename for frame, _ in stack]
        # Of our own frames above the bottom (a collective of mlaunch.comm) the user's line is the one to be in.
        bottom = max((i for i, file in enumerate(files) if is_bottom(file)), default=-1)
        kept = [i for i in range(bottom + 1, len(stack)) if not is_ours(files[i])] or [len(stack) - 1]
        inward = [i for i in reversed(kept) if i <= index] or kept[:1]
        users = innermost_users([files[i] for i in inward]) if t is not None else None
        present = inward[users or 0]
        return [stack[i] for i in kept], kept.index(present)

    def print_stack_entry(self, frame_lineno: tuple[FrameType, int], prompt_prefix: str = "\n-> ") -> None:
        """Shows a place: as IPython's debugger does where its colours are to be had, as pdb does elsewhere."""
        frame, line = frame_lineno
        lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
        # The look of IPython's debugger and not its class: to make one takes 0.9 s in a rank (import 0.3, its shell
        # 0.6; Python 3.11, IPython 9.18, two busy cores), a directory and a database of history.
        if (colour := _colours()) is None or not 0 < line <= len(lines):
            super().print_stack_entry(frame_lineno, prompt_prefix)
            return
        first = max(1, min(line - _CONTEXT // 2, len(lines) - _CONTEXT + 1))
        self.message(f"> {frame.f_code.co_filename}({line}){frame.f_code.co_name}()")
        for number in range(first, min(first + _CONTEXT, len(lines) + 1)):
            arrow = "-> " if number == line else "   "
            self.message(f"{arrow}{number:5} {colour(lines[number - 1].rstrip())}")

    def onecmd(self, line: str) -> bool:
        """Obeys a command; one that steps is none after a failure."""
        if self._failed and line.split()[:1] and line.split()[0] in _STEPS:
            # From habit people continue after a failure, and mean to be done with it.
            if line.split()[0].startswith("c"):
                return self.do_quit(line)
            self.error(_FAILED)
            return False
        return bool(super().onecmd(line))

    def do_continue(self, arg: str) -> bool:
        """c(ont(inue))

        Continue, until the next breakpoint of this rank.
        """
        self._talk.how = Onward.RUNS
        return bool(super().do_continue(arg))

    def do_detach(self, _arg: str) -> bool:
        """detach

        Let this rank go on by itself: it stops at no breakpoint any more, and fails as without a debugger.
        """
        self.detached = True
        self.clear_all_breaks()
        return self.do_quit("") if self._failed else self.do_continue("")

    def do_quit(self, arg: str) -> bool:  # noqa: ARG002 - the base has it
        """q(uit)

        End the launch: all its ranks are stopped. After a failure that is raised where the launch was called.
        """
        self._talk.how = Onward.FAILS if self._failed else Onward.QUITS
        return True

    def do_run(self, arg: str) -> bool:  # noqa: ARG002 - the base has it
        """run, restart

        Not possible here: end the launch with q, and call it again.
        """
        self.error("a rank cannot be started again from here; q ends the launch")
        return False

    def do_interact(self, arg: str) -> None:
        """interact

        Start a Python prompt here, with all names of this place; the end of input (Ctrl-D) leads back.
        """
        with contextlib.redirect_stdout(self._talk), contextlib.redirect_stderr(self._talk):
            super().do_interact(arg)

    def help_all(self) -> None:
        """Tells of the words that the caller obeys."""
        self.message(_SEVERAL)

    def do_EOF(self, arg: str) -> bool:
        """EOF

        Handles the end of input as quit.
        """
        self.message("")
        return self.do_quit(arg)

    do_c = do_cont = do_continue
    do_q = do_exit = do_quit
    do_restart = do_run
    help_ranks = help_switch = help_who = help_all


def _colours() -> Callable[[str], str] | None:
    """Returns what colours a line of Python; None: the terminal shows none, or they are not to be had."""
    if os.environ.get("TERM", "dumb") in {"", "dumb"} or os.environ.get("NO_COLOR"):
        return None
    try:  # what IPython colours with
        from pygments import highlight  # type: ignore[import-untyped, unused-ignore]
        from pygments.formatters import TerminalFormatter  # type: ignore[import-untyped, unused-ignore]
        from pygments.lexers import PythonLexer  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return None
    lexer, formatter = PythonLexer(stripnl=False), TerminalFormatter()
    return lambda line: str(highlight(line, lexer, formatter)).rstrip("\n")


def place_of(frame: FrameType, line: int) -> str:
    """Says where that is; the caller knows a shorter name for the file."""
    return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"


def _traceback_of(found: Any = None) -> TracebackType | None:
    """Returns the traceback of what ``interaction`` gets: from Python 3.13 on an exception."""
    return found.__traceback__ if isinstance(found, BaseException) else found


@contextlib.contextmanager
def _without_readline() -> Iterator[None]:
    before: Any = sys.modules.get("readline")
    modules: dict[str, Any] = sys.modules
    modules["readline"] = None
    try:
        yield
    finally:
        del modules["readline"]
        if before is not None:
            modules["readline"] = before
