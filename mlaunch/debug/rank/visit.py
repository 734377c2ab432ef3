"""A debugger that visits a running rank from another terminal (``mlaunch debug``).

    control thread --asks the interpreter--> main thread, between two instructions: traces from here on
    --next line of user code--> a prompt, as at breakpoint()  --detach, or the visitor is gone--> as before

A main thread inside C code is not disturbed: it stops once that has returned.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import ctypes
import itertools
import os
import pdb
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from mlaunch.base.frames import is_bottom, is_library, is_ours
from mlaunch.debug.rank.breakpoints import BreakpointHook
from mlaunch.debug.rank.rank_pdb import Debugger, RankPdb, Talk
from mlaunch.debug.wire import Onward, PromptLine
from mlaunch.protocol.channel import Channel

if TYPE_CHECKING:
    from mlaunch.debug.wire import RanksEnd

_GENERATED = "<string>"
_Task = Callable[[FrameType | None], None]
_tasks: collections.deque[_Task] = collections.deque()  # for the main thread
_asked = [False]  # True: the main thread runs them, or will
_present: list[Visit] = []  # at most one


def begin(fd: int, rank: int, who: str) -> None:
    """Stop this rank at its next line, and talk with the visitor at the other end of this socket.

    ``who``: "rank 1 of train()". Called by the control thread.
    """
    channel: RanksEnd = Channel.adopt(fd)
    if _present:  # the last visitor has just left
        _present[0].end()
    visit = Visit(channel, rank, who)
    _present.append(visit)
    _in_main_thread(visit.stop)


def end() -> None:
    """Have the rank continue as before the visit. Called by the control thread."""
    if _present:
        visit = _present[0]
        _in_main_thread(lambda _frame: visit.leave())


class Visit(Debugger):
    """One visit. The control thread makes it; all else happens in the rank's other threads."""

    def __init__(self, channel: RanksEnd, rank: int, who: str) -> None:
        super().__init__(channel, rank, who)
        self._channel = channel
        self._talk = VisitorsTalk(channel, rank)
        self._hooks: tuple[Any, Any] | None = None  # as they were before

    def make_debugger(self) -> RankPdb:
        return VisitorsPdb(self._talk, self)

    def leave(self) -> None:
        """End the visit, in the main thread, with all breakpoints."""
        # First: a trace function that meets a closed channel would raise in user code.
        sys.settrace(None)
        for debugger in self._of_threads.values():
            debugger.clear_all_breaks()
            debugger.detached = True
        self.end()

    def end(self) -> None:
        """Restore everything as it was before."""
        if self in _present:
            _present.remove(self)
        if self._hooks is not None and os.getpid() == self._pid:
            sys.breakpointhook, pdb.set_trace = self._hooks
            self._hooks = None
        # A thread at its prompt reads from the channel that the visitor is gone, and ends the visit after that: if the
        # channel were closed here, it would raise in user code.
        if not any(isinstance(one, VisitorsPdb) and one.asks for one in list(self._of_threads.values())):
            self._channel.close()

    def stop(self, frame: FrameType | None) -> None:
        """Stop the main thread at its next line."""
        # The visitor may have left before the main thread returned from C.
        if self not in _present or frame is None:
            return
        self._hooks = sys.breakpointhook, pdb.set_trace
        sys.breakpointhook = BreakpointHook(self._who, self, self._pid)
        pdb.set_trace = sys.breakpointhook
        self.stop_at(frame)


class VisitorsTalk(Talk):
    """A visitor's file: if the visitor is gone, the rank continues."""

    def __init__(self, channel: RanksEnd, rank: int) -> None:
        super().__init__(channel, rank)
        # These lead out of anything that a debugger may be reading: a list of commands, or an unfinished statement.
        self._ways_out = itertools.cycle(["end", None])
        self.is_alone = False

    def _lose(self) -> PromptLine:
        if self.how is Onward.QUITS:
            os._exit(1)  # the launch was to end
        self.is_alone = True
        return PromptLine(next(self._ways_out))

    def ask(self, prompt: object = "", /) -> str:
        line = super().ask(prompt)
        if self.is_alone:
            raise EOFError("nobody is left to ask")
        return line


class VisitorsPdb(RankPdb):
    """Stops in user code, and in what that has called; in no other code of a rank."""

    def __init__(self, talk: Talk, visit: Visit) -> None:
        super().__init__(talk)
        self._visit = visit
        self._arrives = threading.current_thread() is threading.main_thread()  # True until it has stopped
        self.asks = False  # its thread is at a prompt

    def stop_here(self, frame: FrameType) -> bool:
        return bool(super().stop_here(frame)) and _is_users(frame)

    def user_call(self, frame: FrameType, argument_list: Any) -> None:
        if not self._arrives:
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        if not self._arrives:
            super().user_return(frame, return_value)

    def user_exception(self, frame: FrameType, exc_info: Any) -> None:
        if not self._arrives:
            super().user_exception(frame, exc_info)

    def interaction(self, frame: FrameType | None, *trace: Any) -> None:
        before, self.asks = self.asks, True
        try:
            super().interaction(frame, *trace)
        finally:
            self.asks = before
        self._arrives = False
        # The closed channel tells the agent that the next visitor may come.
        if self.detached:
            self._visit.end()

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """Return the frames; the present one is the user's, also if the rank was stopped inside a library."""
        stack, index = super().get_stack(f, t)
        files = [frame.f_code.co_filename for frame, _ in stack]
        users = [i for i, file in enumerate(files) if not is_library(file) and file != _GENERATED]
        return stack, users[-1] if self._arrives and users else index

    def default(self, line: str) -> None:
        """Run a statement. Local variables that it sets change in outer frames, too."""
        super().default(line)
        if sys.version_info < (3, 13):  # where these are a copy
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(self.curframe), ctypes.c_int(0))

    def do_interact(self, arg: str) -> None:
        with self._answering():
            super().do_interact(arg)

    def do_EOF(self, arg: str) -> bool:
        """EOF

        Handle the end of input as detach: a visitor does not end the launch by accident.
        """
        self.message("")
        return self.do_detach(arg)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Have ``input`` ask the visitor."""
        before, builtins.input = builtins.input, self._talk.ask
        try:
            yield
        finally:
            builtins.input = before


def _is_users(frame: FrameType | None) -> bool:
    """True if a frame above the launcher's is of the user's code, or of a module that runs as ``__main__``."""
    while frame is not None and not is_bottom(frame.f_code.co_filename):
        file = frame.f_code.co_filename
        generated = file == _GENERATED  # such as a named tuple's, in our own code
        if not (is_library(file) or generated) or (frame.f_globals.get("__name__") == "__main__" and not is_ours(file)):
            return True
        frame = frame.f_back
    return False


def _in_main_thread(task: _Task) -> None:
    """Have the main thread call a task between two instructions, with its present frame. Do not wait for it."""
    _tasks.append(task)
    # One at a time: if a task begins to trace while another call is pending, Python 3.11 repeats that call's first
    # instruction for ever.
    if _asked[0]:
        return
    _asked[0] = True
    # Not by a signal, which would make system calls of the user's fail. This needs no ptrace, and works before
    # Python 3.14.
    while ctypes.pythonapi.Py_AddPendingCall(_CALLBACK, None) != 0:  # others have filled the queue, of 32
        os.sched_yield()


def _run_tasks(_argument: object) -> int:
    frame = sys._getframe(1)
    try:
        while _asked[0]:
            while _tasks:
                _tasks.popleft()(frame)
            _asked[0] = False
            _asked[0] = bool(_tasks)  # one may have come between the last two lines
    finally:
        _asked[0] = False  # also after a task that raises
    return 0


_CALLBACK = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_run_tasks)
