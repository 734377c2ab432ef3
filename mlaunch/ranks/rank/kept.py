"""A rank that stays: it runs one call after the other, and a call can be ended (called back) without its process."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal wraps in enumerations, for which a call is too short
import _thread
import os
import signal
import sys
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

from mlaunch.base import seeding
from mlaunch.base.frames import is_import
from mlaunch.protocol import calls, this_rank
from mlaunch.protocol.calls import Call
from mlaunch.protocol.messages import AnswerKind, Errand, Phase
from mlaunch.protocol.payload import Payload
from mlaunch.rank import group, in_step, process, rank_imports
from mlaunch.rank.base import RankArgs, Task
from mlaunch.rank.function import FunctionRank, UnpicklableValueError, leave_groups
from mlaunch.ranks.rank import held_objects
from mlaunch.torch_parts import process_groups

_AGAIN = 0.01  # seconds, in which a finalizer or an import has mostly returned
_STALE_LIMIT = 1000  # characters: an answer is one small write
_STALE_MODULES = 10

P = ParamSpec("P")
R = TypeVar("R")
_uninterrupted: set[CodeType] = set()


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function, written in Python, in which no call-back raises: interrupted half-way it would leave a mess."""
    _uninterrupted.add(function.__code__)
    return function


def _must_finish(frame: FrameType | None) -> bool:
    """True if a frame of the present call is part of an import, or of a marked function.

    An import that is interrupted leaves some modules complete and others out. What they registered stays, and in the
    next import they meet in another order ("partially initialized module").
    """
    # By the frames, since they are right at each moment; a counter would itself have moments in between.
    while frame is not None and frame.f_code is not KeptRank._run_call.__code__:
        if frame.f_code in _uninterrupted or is_import(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


class KeptRank(FunctionRank):
    """A rank that stays. After a failed or interrupted call its agent asks whether it is in step with the others."""

    _AFTERWARDS = Phase.IDLE

    def __init__(self, args: RankArgs) -> None:
        super().__init__(args)
        self._board, self._local_rank = args.results.board, args.local_rank
        self._can_be_called_back = False
        self._was_called_back = False
        self._raised: KeyboardInterrupt | None = None
        self._signals_again = 0  # the number of the call that a thread is to end
        self._joined_after = 0  # the number of the call that had left a rank without its group
        self._unraisable = sys.unraisablehook

    def _become_rank(self) -> None:
        super()._become_rank()
        held_objects.table.owner = self._spec.launch_id
        rank_imports.begin_watch()
        signal.signal(signal.SIGINT, self._call_back)
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._take_unraisable
        self._enter(Phase.IDLE)

    def _call_back(self, _number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt in a call that is to end, once; do nothing between calls.

        In the middle of an import, wait for its end; the agent waits for no longer than its grace period.
        """
        if not self._can_be_called_back or not self._is_to_end():
            return
        if _must_finish(frame):
            self._signal_later()
            return
        self._can_be_called_back, self._was_called_back = False, True
        self._raised = KeyboardInterrupt("the call is ended")
        raise self._raised

    @uninterrupted  # Python would drop what is raised here, too
    def _take_unraisable(self, found: sys.UnraisableHookArgs) -> None:
        """Raise the exception again, a moment later, where Python drops it, as in a finalizer."""
        if found.exc_value is None or found.exc_value is not self._raised:
            self._unraisable(found)
            return
        self._can_be_called_back, self._signals_again = True, 0
        self._signal_later()

    def _signal_later(self) -> None:
        """Start the thread that signals again, unless there is one for this call."""
        if self._signals_again != self._number:
            self._signals_again = self._number
            # Unknown to threading, whose lock the frame below may have; and the interpreter's end does not wait for it.
            _thread.start_new_thread(self._signal_again, (self._number,))

    def _signal_again(self, number: int) -> None:
        """Signal until the exception is raised, or the call is over."""
        while self._can_be_called_back and self._is_to_end() and self._number == number:
            time.sleep(_AGAIN)
            os.kill(os.getpid(), signal.SIGINT)

    @property
    def _number(self) -> int:
        return self._task.number if self._task is not None else 0

    def _is_to_end(self) -> bool:
        # The agent notes the number on the board, then signals: a late signal finds a call that it is not about.
        return 0 < self._number <= self._board.stopped(self._local_rank) and not self._is_fork

    def _run_task(self, task: Task) -> None:
        if task.errand is Errand.TELL_NUMBERS:
            self._answer(AnswerKind.VALUE, in_step.since_the_call())
        elif task.errand is Errand.MEET:
            in_step.meet(self._bound)
            self._answer(AnswerKind.VALUE, None)
        else:
            self._run_call(task)
        process.fill_streams()  # the call may have closed them

    def _run_call(self, task: Task) -> None:
        in_step.begin_call(task.number)
        this_rank.begin_call(task.number)
        if _signal.getsignal(signal.SIGINT) != self._call_back:  # a call before has set another one
            signal.signal(signal.SIGINT, self._call_back)
        self._was_called_back = False
        try:
            try:
                self._can_be_called_back = True
                if self._is_to_end():  # the signal came before we could raise
                    self._call_back(signal.SIGINT, None)
                if self._joined_after != self._board.apart < task.number:  # else a rank is a call ahead
                    self._join_again(task.number)
                super()._run_task(task)
            finally:
                self._can_be_called_back, self._raised = False, None
        except SystemExit:  # ends the rank, as in any launch; the caller gets new ranks
            raise
        except BaseException as error:
            if self._is_fork:
                raise
            self._tell(error, self._kind_of(error), consequence=self._was_called_back)
            self._enter(self._AFTERWARDS)
            _let_go(error)

    def _join_again(self, call: int) -> None:
        """Make the default process group again, which an earlier call has destroyed. Collective."""
        after, hook = self._board.apart, sys.excepthook
        leave_groups()  # this rank may still have it, and cannot use it
        try:
            there = self._spec, self._local_rank, self._args.rendezvous, self._bound
            group.meet_and_join(*there, again=after, before=self._joined_after)
        except Exception as error:
            raise RuntimeError(
                f"an earlier call on these ranks has destroyed the default process group, and it could not be made "
                f"again: {error}; leave out destroy_process_group() in functions whose ranks stay"
            ) from error
        sys.excepthook = hook  # torch puts one more around it each time, without end
        self._joined_after = after
        in_step.begin_call(call)

    def _kind_of(self, error: BaseException) -> AnswerKind:
        if self._was_called_back and isinstance(error, KeyboardInterrupt):
            return AnswerKind.INTERRUPTED
        return AnswerKind.UNPICKLABLE if isinstance(error, UnpicklableValueError) else AnswerKind.ERROR

    def _stale(self) -> str:
        rank_imports.note_new()  # before the caller can change a file
        # One rank of a machine is enough: all have imported from the same files.
        if self._local_rank > 0:
            return ""
        return ",".join(rank_imports.stamps()[:_STALE_MODULES])[:_STALE_LIMIT]

    def _answer(self, kind: AnswerKind, content: Any, *, consequence: bool = False) -> None:
        process.flush()  # a line without its end belongs to this call, not to the next
        if process_groups.is_apart() and self._task is not None:
            self._board.apart = self._task.number
        super()._answer(kind, content, consequence=consequence)

    def _seal(self) -> None:
        self._can_be_called_back = False

    def _receive(self, task: Task) -> tuple[Callable[..., Any], Call]:
        function, call = super()._receive(task)
        # It may be mapped, and would keep the arguments in memory until the next call.
        if task.call is not None:
            task.call.close()
        if call.freed:
            held_objects.table.free(call.freed)
        if call.seed is not None:
            seeding.apply(seeding.of_rank(call.seed, self._spec.rank(self._local_rank)))
        return function, call

    def _read(self, content: Payload) -> Call:
        return calls.from_plain(content.read())

    def _outcome_of(self, call: Call, value: object) -> object:
        return value if call.held is None else held_objects.table.hold(call.held, value)


def _let_go(error: BaseException) -> None:
    """Drop what the frames of an exception hold, such as a model that leaves the next call no room on the device."""
    found = [error]
    for one in found:  # which may be each other's cause
        one.with_traceback(None)  # an exception may refuse attributes, but not this
        for other in (one.__cause__, one.__context__):
            if other is not None and all(other is not known for known in found):
                found.append(other)
