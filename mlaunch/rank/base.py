"""What all ranks do: take over their caller's surroundings, answer on their descriptors, and say how they fail."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing.process
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from mlaunch.base import linux
from mlaunch.base.fds import in_forks
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.process_name import name_process
from mlaunch.base.text import first_bytes
from mlaunch.protocol import payload, stack_dump, temporary
from mlaunch.protocol.calls import Call
from mlaunch.protocol.channel import Channel, assert_never
from mlaunch.protocol.messages import (
    Answer,
    AnswerFile,
    AnswerKind,
    ControlHears,
    ControlSays,
    DirectCall,
    Errand,
    Phase,
    RankHears,
    RankSays,
    Release,
    RunCall,
)
from mlaunch.protocol.payload import Payload
from mlaunch.protocol.result_queue import ANSWER_LIMIT, Results
from mlaunch.protocol.spec import Details, LaunchSpec, with_details
from mlaunch.rank import control, remote_error
from mlaunch.rank.for_users import progress
from mlaunch.rank.setup import device, process
from mlaunch.torch_parts import operations

if TYPE_CHECKING:
    from mlaunch.core.load import RankParts

_EXIT_TEXT = 8192  # bytes of what sys.exit is given


@frozen_record
class RankArgs:
    """What a rank gets from its agent: who it is, where the others are, the ways back."""

    spec: LaunchSpec
    local_rank: int
    rendezvous: tuple[str, int]  # address and port
    results: Results
    channel: Channel[RankHears, RankSays]  # on which the agent sends calls
    crash_fd: int  # where faulthandler writes when the rank crashes
    stack_fd: int  # where it writes when the agent asks
    pipes: Mapping[int, int]  # of its streams beside the standard ones, by number
    control: Channel[ControlHears, ControlSays]  # on which its control thread is asked, whatever the rank does
    inherited: Call | None  # the call, if the rank has it in memory; None: it comes over the channel


class Task(NamedTuple):
    """One call as a rank holds it. ``call`` None: the rank has it in memory."""

    number: int
    call: Payload | None
    errand: Errand = Errand.RUN
    from_launcher: bool = False  # which gets a small value without the agent


class Rank:
    """A process of a launch. Its life has three parts: becoming a rank, answering calls, leaving."""

    def __init__(self, args: RankArgs) -> None:
        self._args = args
        self._spec = args.spec
        self._pid = os.getpid()  # a fork that returns from the function would answer as if it were the rank
        self._who = self._named()
        self._device = args.spec.devices.type
        self._parts: RankParts | None = None  # of the launch's features
        self._is_fork = False  # this is not the rank but a process that it forked, which came back through its code
        self._task: Task | None = None
        self._answer_fd = -1  # the memfd for large answers
        ways = [args.channel.fileno(), *args.results.ways()]
        self._kept = linux.identities(ways)  # what it answers on
        in_forks(self._disown)

    def _named(self) -> str:
        """Names this process after its launch; returns what messages call it."""
        role = f"rank {self._spec.rank(self._args.local_rank)}"
        name_process(role, self._spec.call.name)
        return f"{role} of {self._spec.call.name}"

    def _begin_parts(self) -> None:
        """Has the launch's features act, before anything else of this process does."""
        from mlaunch.core.load import RankParts  # which most launches do not need

        self._parts = RankParts(self._spec, self._args.local_rank, self._args.pipes)
        self._spec = self._parts.begin(self._spec, self._args.local_rank)
        self._args.results.board.note_place(self._args.local_rank, self._parts.place)

    def live(self) -> int:
        """Lives a rank's life; returns the exit code."""
        raise NotImplementedError

    def _enter(self, phase: Phase) -> None:
        if not self._is_fork:  # whose phase is its own business
            self._args.results.board[self._args.local_rank] = phase

    @property
    def _phase(self) -> Phase:
        return self._args.results.board[self._args.local_rank]

    def _take_surroundings(self, environ: dict[str, str]) -> None:
        """Takes over those of the caller, and sets the handlers by which the agent asks."""
        args, context = self._args, self._spec.context
        faulthandler.enable(linux.aside(args.crash_fd))  # which is written to without a look, whatever it has become
        stack_dump.answer_requests(linux.aside(args.stack_fd))
        process.leave_to_caller(self._spec.callers_signals)
        process.set_environ(environ)
        os.chdir(context.cwd)
        # Where its children look for a script with a relative path.
        multiprocessing.process.ORIGINAL_DIR = context.cwd  # type: ignore[attr-defined]
        if context.authkey:
            multiprocessing.current_process().authkey = context.authkey
        temporary.share(self._spec)
        sys.path[:] = context.sys_path  # in place: others hold the list itself
        sys.argv[:] = context.argv
        device.share_cores(self._spec)
        if self._spec.streams(args.local_rank):
            linux.print_by_lines()
        progress.open_slot(args.results.board, args.local_rank)
        if not operations.is_watched:  # else the fork server did it
            operations.watch()
        control.start(args.control)

    # Calls

    def _next_task(self) -> Task | None:
        """Waits for the next call; None if the agent has released this rank."""
        record, fds = self._hear()
        match record:
            case (number, data):
                self._task = Task(number, Payload(data, *fds), from_launcher=True)
            case RunCall():
                self._task = self._task_of(record, fds)
            case Release():
                return None
            case _:
                assert_never(record)
        return self._task

    def _task_of(self, record: RunCall, fds: list[int]) -> Task:
        """Returns the call that the agent has sent, after what came beside it has been taken in."""
        # In the order in which the agent has appended them: the call, what is held, the file for answers.
        call_fd = fds.pop(0) if record.attached else -1
        held = record.details.held if record.details is not None else 0
        for fd in fds[:held]:  # until this process ends, out of the way of the user's
            if linux.aside(fd) != fd:
                os.close(fd)
        fds = fds[held:]
        if fds:
            self._take_answer_fd(*fds)
        call = Payload(record.data, call_fd) if record.data or record.attached else None
        if record.details is not None:
            self._learn(record.details)
        return Task(record.number, call, record.errand)

    def _learn(self, details: Details) -> None:
        """Takes in, as a rank that was prepared, what its launch is about."""
        self._spec = with_details(self._spec, details)
        self._who = self._named()
        sys.argv[:] = details.argv
        os.environ.update(details.environ)

    def _hear(self) -> tuple[RunCall | Release | DirectCall, list[int]]:
        """Waits for the next record that is not about where to write."""
        while True:
            try:
                record, fds = self._args.channel.receive()
            except EOFError:  # the agent is gone, and the kernel is about to end us as well
                os._exit(1)
            if not isinstance(record, AnswerFile):
                return record, fds
            self._take_answer_fd(*fds)

    def _take_answer_fd(self, fd: int) -> None:
        """Takes a memfd for answers instead of the last one, which may be mapped."""
        # The caller maps the last answer: its values would change under the user if it were written to again.
        was, self._answer_fd = self._answer_fd, fd
        if was >= 0:
            del self._kept[was]
            os.close(was)
        self._kept[fd] = linux.identity(fd)

    def _answer(self, kind: AnswerKind, content: Any, *, consequence: bool = False) -> None:
        """Sends an answer on its queue, with the content; a large one goes into the memfd before."""
        task = self._task or self._next_task()  # a rank that fails before a call has come answers the first one
        if task is None:
            return
        # Before the descriptors are looked at: a __reduce__ is user code, and may close them.
        data = payload.answer(content, self._memfd, most=ANSWER_LIMIT, to_caller=kind is AnswerKind.VALUE)
        self._check_descriptors()
        self._seal()
        results, rank, stale = self._args.results, self._args.local_rank, self._stale()
        if task.from_launcher and data and kind is AnswerKind.VALUE:
            results.answer_launcher((rank, task.number, stale, data))
        else:
            results.answer(Answer(rank, task.number, kind, consequence, stale, data), direct=task.from_launcher)

    def _memfd(self) -> int:
        """Returns where to write what is too large for the queue."""
        self._check_descriptors()
        return self._answer_fd

    def _seal(self) -> None:
        """Called when the answer is complete: from now on a call-back must not replace it."""

    def _stale(self) -> str:
        """Names the modules of this rank, with commas and times, whose files are newer than what it runs."""
        return ""

    def _disown(self) -> None:
        """Takes what a rank answers with from a fork of it, which would share even the place that it writes to."""
        self._is_fork = True
        null = os.open(os.devnull, os.O_RDWR)  # not closed: no file of the fork's may get these numbers
        for fd, kept in self._kept.items():
            if linux.identity(fd) == kept:
                os.dup2(null, fd, inheritable=False)
        os.close(null)

    def _check_descriptors(self) -> None:
        """Ends a process that must not answer: a fork of the rank, or a rank whose descriptors are no longer ours."""
        if self._is_fork or os.getpid() != self._pid:
            _end(f"process {os.getpid()}, a fork of {self._who}, has returned from the function as if it were the "
                 f"rank; it is ended here and its value is dropped. End such a process with os._exit()")  # fmt: skip
        # os.closerange is common in code that makes daemons, and what stands at the number then is a file of the
        # user's.
        if linux.identities(self._kept) != self._kept:
            self._enter(Phase.SEVERED)
            _end(f"{self._who} cannot answer: its function closed file descriptors that belong to mlaunch "
                 f"(os.closerange?); close only those that it opened")  # fmt: skip

    def _note_exit(self, leaving: SystemExit) -> None:
        """Leaves the text of ``sys.exit("text")`` for the report, where a crash leaves its stacks."""
        if self._is_fork or leaving.code is None or isinstance(leaving.code, int):
            return
        fd, text = self._args.crash_fd, first_bytes(f"SystemExit: {leaving.code}", _EXIT_TEXT)
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith(
                "/memfd:mlaunch-crash-"
            ):  # else it is a user's file by now
                os.write(fd, f"{text}\n".encode())

    def _report(self, error: BaseException, *, kind: AnswerKind = AnswerKind.ERROR) -> None:
        """Answers with an exception, and stays until the others are stopped, whose collectives its end would break."""
        self._tell(error, kind)
        self._hear()

    def _tell(self, error: BaseException, kind: AnswerKind, *, consequence: bool = False) -> None:
        """Answers with an exception."""
        phase = self._phase
        self._enter(Phase.FAILING)
        # a script's classes are not the caller's
        catchable = kind is AnswerKind.ERROR and isinstance(error, Exception) and self._spec.target is None
        remote = remote_error.describe(error, phase, self._device, catchable=catchable)
        self._answer(kind, remote, consequence=consequence or remote_error.is_consequence(remote))


def _end(text: str) -> NoReturn:
    print(f"mlaunch: {text}", file=sys.stderr, flush=True)
    process.flush()
    os._exit(1)
