"""The base of all ranks: they take over their caller's surroundings, answer, and report failures."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing.process
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from mlaunch.base import frames, linux
from mlaunch.base.fds import in_forks
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.own_process import name_process
from mlaunch.base.text import first_bytes
from mlaunch.protocol import launch_files, payload
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
from mlaunch.rank import control, device, for_users, process, remote_error
from mlaunch.torch_parts import operations

if TYPE_CHECKING:
    from mlaunch.core.load import RankParts

_EXIT_TEXT = 8192  # bytes of what sys.exit is given


@frozen_record
class RankArgs:
    """The arguments that a rank gets from its agent: its place, where the others are, the channels to the agent."""

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
    """A call, as a rank holds it. ``call`` None: the rank has it in memory."""

    number: int
    call: Payload | None
    errand: Errand = Errand.RUN
    from_launcher: bool = False  # True: a small value goes back without the agent


class Rank:
    """A process of a launch. Its life has three parts: becoming a rank, answering calls, leaving."""

    def __init__(self, args: RankArgs) -> None:
        self._args = args
        self._spec = args.spec
        self._pid = os.getpid()  # a fork that returns from the function must not answer as if it were the rank
        self._who = self._named()
        self._device = args.spec.devices.type
        self._parts: RankParts | None = None  # of the launch's features
        self._is_fork = False  # True in a process that the rank forked, and that came back through the rank's code
        self._enter = args.results.board.phase_writer(args.local_rank)
        self._task: Task | None = None
        self._answer_fd = -1  # the memfd for large answers
        self._kept = linux.identities([args.channel.fileno(), *args.results.ways()])  # the rank answers on these
        in_forks(self._disown)

    def _named(self) -> str:
        """Name this process after its launch; return what messages call it."""
        role = f"rank {self._spec.rank(self._args.local_rank)}"
        name_process(role, self._spec.call.name)
        return f"{role} of {self._spec.call.name}"

    def _begin_parts(self) -> None:
        """Make the parts of the launch's features, which act before anything else in this process."""
        from mlaunch.core.load import RankParts  # which most launches do not need

        self._parts = RankParts(self._spec, self._args.local_rank, self._args.pipes)
        self._spec = self._parts.begin(self._spec, self._args.local_rank)
        self._args.results.board.note_place(self._args.local_rank, self._parts.place)

    def live(self) -> int:
        """Live a rank's life; return the exit code."""
        raise NotImplementedError

    @property
    def _phase(self) -> Phase:
        return self._args.results.board[self._args.local_rank]

    def _take_surroundings(self, environ: dict[str, str]) -> None:
        """Take over the caller's surroundings, and answer the agent's questions from now on."""
        args, context = self._args, self._spec.context
        faulthandler.enable(
            linux.aside(args.crash_fd)
        )  # aside: written to unchecked, even if user code has reused the number
        frames.answer_requests(linux.aside(args.stack_fd))
        process.leave_to_caller(self._spec.callers_signals)
        process.set_environ(environ)
        os.chdir(context.cwd)
        # Its children look here for a script with a relative path.
        multiprocessing.process.ORIGINAL_DIR = context.cwd  # type: ignore[attr-defined]
        if context.authkey:
            multiprocessing.current_process().authkey = context.authkey
        launch_files.share_temporary(self._spec)
        sys.path[:] = context.sys_path  # in place: others hold the list itself
        sys.argv[:] = context.argv
        device.share_cores(self._spec)
        if self._spec.streams(args.local_rank):
            linux.print_by_lines()
        for_users.open_slot(args.results.board, args.local_rank)
        if not operations.is_watched:  # else the fork server did it
            operations.watch()
        control.start(args.control)

    # Calls

    def _next_task(self) -> Task | None:
        """Wait for the next call; None if the agent has released this rank."""
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
        """Return the call that the agent has sent; take what came beside it."""
        # In the order in which the agent has appended them: the call, what is held, the file for answers.
        call_fd = fds.pop(0) if record.attached else -1
        held = record.details.held if record.details is not None else 0
        for fd in fds[:held]:  # kept until this process ends, at numbers that the user's files do not get
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
        """Take the details of the launch that a prepared rank has been given."""
        self._spec = with_details(self._spec, details)
        self._who = self._named()
        sys.argv[:] = details.argv
        os.environ.update(details.environ)

    def _hear(self) -> tuple[RunCall | Release | DirectCall, list[int]]:
        """Wait for the next record other than a file for answers."""
        while True:
            try:
                record, fds = self._args.channel.receive()
            except EOFError:  # the agent is gone, and the kernel is about to end us as well
                os._exit(1)
            if not isinstance(record, AnswerFile):
                return record, fds
            self._take_answer_fd(*fds)

    def _take_answer_fd(self, fd: int) -> None:
        """Take a new memfd for answers in place of the last one."""
        # The caller may have mapped the last one: its values would change under the user.
        was, self._answer_fd = self._answer_fd, fd
        if was >= 0:
            del self._kept[was]
            os.close(was)
        self._kept[fd] = linux.identity(fd)

    def _answer(self, kind: AnswerKind, content: Any, *, consequence: bool = False) -> None:
        """Send an answer on its queue, with the content; a large one goes into the memfd before."""
        task = self._task or self._next_task()  # a rank that fails before a call has come answers the first one
        if task is None:
            return
        # Before the descriptors are checked: a __reduce__ is user code, and may close them.
        data = payload.answer(content, self._memfd, most=ANSWER_LIMIT, to_caller=kind is AnswerKind.VALUE)
        self._check_descriptors()
        self._seal()
        results, rank, stale = self._args.results, self._args.local_rank, self._stale()
        if task.from_launcher and data and kind is AnswerKind.VALUE:
            results.answer_launcher((rank, task.number, stale, data))
        else:
            results.answer(Answer(rank, task.number, kind, consequence, stale, data), direct=task.from_launcher)

    def _memfd(self) -> int:
        """Return where to write what is too large for the queue."""
        self._check_descriptors()
        return self._answer_fd

    def _seal(self) -> None:
        """Keep call-backs from replacing the answer, which is complete now."""

    def _stale(self) -> str:
        """Return the modules whose files are newer than what runs here, with their times, separated by commas."""
        return ""

    def _disown(self) -> None:
        """Close, in a fork of the rank, what the rank answers on, even the position in a file."""
        self._is_fork, self._enter = True, _enter_nothing
        null = os.open(os.devnull, os.O_RDWR)  # in place of them: no file of the fork may get these numbers
        for fd, kept in self._kept.items():
            if linux.identity(fd) == kept:
                os.dup2(null, fd, inheritable=False)
        os.close(null)

    def _check_descriptors(self) -> None:
        """End a process that must not answer: a fork of the rank, or a rank whose descriptors are no longer ours."""
        if self._is_fork or os.getpid() != self._pid:
            _end(f"process {os.getpid()}, a fork of {self._who}, has returned from the function as if it were the "
                 f"rank; it is ended here and its value is dropped. End such a process with os._exit()")  # fmt: skip
        # os.closerange is common in code that makes daemons; a file of the user may have the number then.
        if linux.identities(self._kept) != self._kept:
            self._enter(Phase.SEVERED)
            _end(f"{self._who} cannot answer: its function closed file descriptors that belong to mlaunch "
                 f"(os.closerange?); close only those that it opened")  # fmt: skip

    def _note_exit(self, leaving: SystemExit) -> None:
        """Leave the text of ``sys.exit("text")`` for the report, where a crash leaves its stacks."""
        if self._is_fork or leaving.code is None or isinstance(leaving.code, int):
            return
        fd, text = self._args.crash_fd, first_bytes(f"SystemExit: {leaving.code}", _EXIT_TEXT)
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith(
                "/memfd:mlaunch-crash-"
            ):  # else it is a user's file by now
                os.write(fd, f"{text}\n".encode())

    def _report(self, error: BaseException, *, kind: AnswerKind = AnswerKind.ERROR) -> None:
        """Answer with an exception, and stay until the others are stopped: to end now would break their collectives."""
        self._tell(error, kind)
        self._hear()

    def _tell(self, error: BaseException, kind: AnswerKind, *, consequence: bool = False) -> None:
        """Answer with an exception."""
        phase = self._phase
        self._enter(Phase.FAILING)
        # The caller has no class of a script.
        catchable = kind is AnswerKind.ERROR and isinstance(error, Exception) and self._spec.target is None
        remote = remote_error.describe(error, phase, self._device, catchable=catchable)
        self._answer(kind, remote, consequence=consequence or remote_error.is_consequence(remote))


def _enter_nothing(_phase: Phase) -> None:
    """Note no phase, in a fork of a rank, whose phases are its own business."""


def _end(text: str) -> NoReturn:
    print(f"mlaunch: {text}", file=sys.stderr, flush=True)
    process.flush()
    os._exit(1)
