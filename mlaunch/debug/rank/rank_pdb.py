"""pdb in a rank: without mlaunch's frames, and with commands for several ranks and for the end of the launch.

Its lines come from the caller's terminal, and go there. Threads of a rank take turns: a thread has the turn from its
prompt until the rank continues.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import linecache
import os
import pdb
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from mlaunch.base.frames import innermost_users, is_bottom, is_ours
from mlaunch.debug.wire import Onward, PromptAsks, PromptLeft, PromptLine, PromptSays
from mlaunch.rank import group, remote_error

if TYPE_CHECKING:
    from mlaunch.debug.wire import PromptHears, PromptTells, RanksEnd


_AT_ONCE = 8000  # characters in a record


class Talk(io.TextIOBase):
    """The file that a debugger in a rank reads and writes. ``rank``: its number, for prompts."""

    def __init__(self, channel: RanksEnd, rank: int) -> None:
        self._channel = channel
        self._rank = rank
        self._turn = threading.RLock()
        self._begun = ""  # of a line
        self._place = ""
        self._depth = 0  # of turns that one thread has taken inside each other
        self.how = Onward.RUNS  # after this turn

    @property
    def prompt(self) -> str:
        """The prompt, with the rank and the thread that the command is for."""
        thread = threading.current_thread()
        of_thread = "" if thread is threading.main_thread() else f", thread {thread.name}"
        return f"(Pdb, rank {self._rank}{of_thread}) "

    @contextlib.contextmanager
    def turn(self, place: str) -> Iterator[None]:
        """Keep other threads from talking; tell the caller at the end how the rank continues."""
        with self._turn:
            before, self._place = self._place, place
            self._depth += 1
            self.how = Onward.RUNS
            try:
                yield
            finally:
                self._depth -= 1
                self._place = before
                # A prompt may open another one (a breakpoint in what it evaluates); the rank continues after the
                # outermost.
                if not self._depth:
                    self._leave(place)

    def write(self, text: str) -> int:
        """Send lines once they are whole."""
        lines, end, self._begun = (self._begun + text).rpartition("\n")
        whole = lines + end
        # A record is one packet of a socket, whose size the kernel limits.
        for start in range(0, len(whole), _AT_ONCE):
            self._send(PromptSays(whole[start : start + _AT_ONCE]))
        return len(text)

    def readline(self, _size: int | None = -1) -> str:  # type: ignore[override]  # text, not bytes
        """Ask for a line, with the last unfinished line as its prompt. Return "" if no more come."""
        with contextlib.suppress(Exception):  # what a user's stream raises
            # So that what the function has printed before comes above the prompt.
            sys.stdout.flush()
        prompt, self._begun = self._begun, ""
        self._send(PromptAsks(prompt[-_AT_ONCE:], self._place))
        text = self._receive().text
        return "" if text is None else f"{text}\n"

    def ask(self, prompt: object = "", /) -> str:
        """Do what ``input`` does for user code. EOFError if no more lines come."""
        with self.turn(""):
            self.write(f"[{self._rank}] {prompt}")
            line = self.readline()
        if not line:
            raise EOFError("no more lines come from the terminal")
        return line[:-1]

    def _leave(self, place: str) -> None:
        if self._begun:
            self.write("\n")
        self._send(PromptLeft(self.how, place))
        # Not even a user's finally may run: it may enter a collective alone.
        if self.how is Onward.QUITS:
            self._wait_for_end()

    def _send(self, record: PromptTells) -> None:
        self._channel.try_send(record)

    def _receive(self) -> PromptHears:
        try:
            return self._channel.receive()[0]
        except EOFError:
            return self._lose()

    def _lose(self) -> PromptLine:
        """End this process: the caller is gone or has closed the channel, and the agent is about to end it anyway."""
        os._exit(1)

    def _wait_for_end(self) -> NoReturn:
        """Run no more user code until the agent ends this process."""
        while True:
            self._receive()


_Stack = list[tuple[FrameType, int]]
_STEPS = {"next", "n", "step", "s", "until", "unt", "return", "r", "jump", "j", "continue", "cont", "c"}
_SEVERAL = """\
all COMMAND         gives a command to all ranks that have stopped ("all n")
ranks 1,3 COMMAND   gives it to some of them
switch 2            goes to the prompt of rank 2
who                 shows where each rank is"""
_CONTEXT = 5  # lines of source, as IPython's debugger shows
_FAILED = "the function has failed here and cannot continue; look around, q ends the launch"


class RankPdb(pdb.Pdb):
    """The debugger of one thread of a rank. ``failed``: at an exception that nobody has caught."""

    def __init__(self, talk: Talk, *, failed: bool = False) -> None:
        with _without_readline():  # it would set up a terminal, which this process does not have
            file: Any = talk
            # nosigint: Ctrl-C is for the caller, who has the terminal; readrc: a .pdbrc could stop a rank unseen.
            super().__init__(stdin=file, stdout=file, skip=["mlaunch", "mlaunch.*"], nosigint=True, readrc=False)
        self._talk = talk
        self._failed = failed
        self.prompt = talk.prompt
        self.detached = False

    def interaction(self, frame: FrameType | None, *trace: Any) -> None:
        """Talk until the rank is to continue."""
        stack, index = self.get_stack(frame, _traceback_of(*trace))
        with self._talk.turn(place_of(stack[index][0], stack[index][1])):
            self._talk.how = Onward.STEPS
            super().interaction(frame, *trace)

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[_Stack, int]:
        """Return the frames but mlaunch's, and the index of the present one: after a failure the user's innermost."""
        stack, index = super().get_stack(f, t)
        files = [frame.f_code.co_filename for frame, _ in stack]
        # Not in mlaunch's own frames above the bottom (a collective of mlaunch.comm), but at the user's line.
        bottom = max((i for i, file in enumerate(files) if is_bottom(file)), default=-1)
        kept = [i for i in range(bottom + 1, len(stack)) if not is_ours(files[i])] or [len(stack) - 1]
        inward = [i for i in reversed(kept) if i <= index] or kept[:1]
        users = innermost_users([files[i] for i in inward]) if t is not None else None
        present = inward[users or 0]
        return [stack[i] for i in kept], kept.index(present)

    def print_stack_entry(self, frame_lineno: tuple[FrameType, int], prompt_prefix: str = "\n-> ") -> None:
        """Show a place: as IPython's debugger does if colours are available, else as pdb does."""
        frame, line = frame_lineno
        lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
        # Only like IPython's debugger, not its class: to make one takes 0.9 s in a rank (import 0.3, its shell 0.6;
        # Python 3.11, IPython 9.18, two busy cores), a directory and a database of history.
        if (colour := _colours()) is None or not 0 < line <= len(lines):
            super().print_stack_entry(frame_lineno, prompt_prefix)
            return
        first = max(1, min(line - _CONTEXT // 2, len(lines) - _CONTEXT + 1))
        self.message(f"> {frame.f_code.co_filename}({line}){frame.f_code.co_name}()")
        for number in range(first, min(first + _CONTEXT, len(lines) + 1)):
            arrow = "-> " if number == line else "   "
            self.message(f"{arrow}{number:5} {colour(lines[number - 1].rstrip())}")

    def onecmd(self, line: str) -> bool:
        """Obey a command; after a failure, refuse one that steps."""
        if self._failed and line.split()[:1] and line.split()[0] in _STEPS:
            # Out of habit people type continue after a failure to be done with it.
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

        Let this rank run without the debugger: it stops at no breakpoint, and fails as usual.
        """
        self.detached = True
        self.clear_all_breaks()
        return self.do_quit("") if self._failed else self.do_continue("")

    def do_quit(self, arg: str) -> bool:  # noqa: ARG002 - the base has it
        """q(uit)

        End the launch: all its ranks are stopped. After a failure, it is raised where the launch was called.
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
        """Print the commands for several ranks, which the caller obeys."""
        self.message(_SEVERAL)

    def do_EOF(self, arg: str) -> bool:
        """EOF

        Handle the end of input as quit.
        """
        self.message("")
        return self.do_quit(arg)

    do_c = do_cont = do_continue
    do_q = do_exit = do_quit
    do_restart = do_run
    help_ranks = help_switch = help_who = help_all


def _colours() -> Callable[[str], str] | None:
    """Return a function that colours a line of Python; None: the terminal shows no colours, or pygments is missing."""
    if os.environ.get("TERM", "dumb") in {"", "dumb"} or os.environ.get("NO_COLOR"):
        return None
    try:  # as IPython does
        from pygments import highlight  # type: ignore[import-untyped, unused-ignore]
        from pygments.formatters import TerminalFormatter  # type: ignore[import-untyped, unused-ignore]
        from pygments.lexers import PythonLexer  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return None
    lexer, formatter = PythonLexer(stripnl=False), TerminalFormatter()
    return lambda line: str(highlight(line, lexer, formatter)).rstrip("\n")


def place_of(frame: FrameType, line: int) -> str:
    """Return a place as text; the caller shortens the file's name."""
    return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"


def _traceback_of(found: Any = None) -> TracebackType | None:
    """Return the traceback in what ``interaction`` gets: an exception from Python 3.13 on."""
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


class Debugger:
    """A rank whose caller debugs: it stops at ``breakpoint()`` and at its failure, and asks what to do.

    Made once in a rank, before it joins its group. ``who``: "rank 1 of train()".
    """

    def __init__(self, channel: RanksEnd, rank: int, who: str) -> None:
        self._talk = Talk(channel, rank)
        self._who = who
        self._pid = os.getpid()
        self._of_threads: dict[int, RankPdb] = {}
        self._has_examined = False

    def install(self) -> None:
        """Have ``input`` ask the caller and ``pdb.set_trace`` stop as ``breakpoint`` does; lift limits."""
        sys.settrace(None)  # a debugger of the caller's, if this process is a fork of it
        threading.settrace(None)
        # A rank has no standard input; the caller's terminal is at the other end of the channel.
        builtins.input = self._input(builtins.input)
        pdb.set_trace = sys.breakpointhook
        group.lift_limits()

    def stop_at(self, frame: FrameType) -> None:
        """Open a prompt at the next line of this frame, in this thread."""
        if not self._is_detached():
            thread = threading.get_ident()
            if thread not in self._of_threads:
                self._of_threads[thread] = self.make_debugger()
            self._of_threads[thread].set_trace(frame)

    def make_debugger(self) -> RankPdb:
        """Return a debugger for this thread."""
        return RankPdb(self._talk)

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the function, and open a prompt where it fails."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            # First: it would trace mlaunch's frames on the way out.
            sys.settrace(None)
            if not self._has_examined:
                self.examine(error)
            raise
        finally:
            sys.settrace(None)

    def step_into(self, function: Callable[..., Any], **values: Any) -> Any:
        """Run the function, with a prompt at its first line."""
        return self._of_threads.setdefault(threading.get_ident(), RankPdb(self._talk)).runcall(function, **values)

    def examine(self, error: BaseException) -> None:
        """Open a prompt where an exception was raised, if that was in this rank; return when it is to propagate."""
        # If ranks fail because of another one, only that one asks.
        if os.getpid() != self._pid or self._is_detached() or remote_error.is_of_another(str(error)):
            return
        self._has_examined = True
        debugger = RankPdb(self._talk, failed=True)
        with self._talk.turn(""):
            said = str(error).partition("\n")[0]
            self._talk.write(f"{self._who} raised {type(error).__name__}{': ' if said else ''}{said}\n")
            debugger.interaction(None, error.__traceback__)

    def _is_detached(self) -> bool:
        return any(debugger.detached for debugger in self._of_threads.values())

    def _input(self, usual: Callable[..., str]) -> Callable[..., str]:
        """Return the rank's ``input``; in a child of the rank it is the usual one."""
        return lambda prompt="", /: self._talk.ask(prompt) if os.getpid() == self._pid else usual(prompt)
