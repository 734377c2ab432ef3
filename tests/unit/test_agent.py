"""The supervisor's policy, on records and a clock that the test moves: no processes of launches."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlaunch.agent import fork_ranks as fork_ranks_module
from mlaunch.agent import rank_process
from mlaunch.agent.inspection import Inspection
from mlaunch.agent.one_call import WAIT_LIMIT, Calls, OneCall, PreparedCall
from mlaunch.agent.questions import NumberRequests, Questions
from mlaunch.agent.rank_process import RankProcess, StackRequests, is_ending, is_failing, request_stacks, watch_threads
from mlaunch.agent.stopping import END_DELAY, Escalation
from mlaunch.agent.supervision import NoLaunchError, Peers, Supervision, System
from mlaunch.agent.supervisor import Supervisor
from mlaunch.agreed_stop.wire import NAME, AskToStop
from mlaunch.base import frames, linux
from mlaunch.base.deadline import NEVER, Deadline
from mlaunch.base.fds import OwnedFds
from mlaunch.base.frames import STACKS_TIMEOUT, STARVED_TIMEOUT
from mlaunch.base.linux import wait_readable
from mlaunch.debug.wire import HoldDeadline
from mlaunch.forkserver.children import Child
from mlaunch.machines.agent import LinkedPeers
from mlaunch.protocol import launch_files, messages, payload, registry
from mlaunch.protocol.board import Board
from mlaunch.protocol.channel import FD_LIMIT, TEXT_LIMIT, Channel
from mlaunch.protocol.messages import (
    CAUSE_DELAY,
    AnswerKind,
    CallOver,
    Cancel,
    EndCall,
    EndRanks,
    ForPart,
    NextCall,
    Phase,
    Refused,
    Told,
)
from mlaunch.protocol.result_queue import Results
from mlaunch.rank import function, in_step
from mlaunch.rank.base import Rank
from mlaunch.rank.in_step import Numbers
from mlaunch.ranks.agent import RepeatedCalls
from mlaunch.torch_parts import process_groups
from tests.processes import said_in_fork

BOTTOM = function.__file__
HEAD = "Current thread 0x1 (most recent call first):\n"


class FakeServer:
    """Never dies by itself."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self.sentinel = self._ours.fileno()
        self.pid = 999_999

    def kill(self) -> None:
        self._ours.close()
        self._theirs.close()


@dataclass
class World:
    """Ranks are children that end when a byte tells them to; signals are recorded, and end them if they should."""

    size: int = 3
    now: float = 100.0
    signals: list[tuple[int, str, float]] = field(default_factory=list)
    deadline: float | None = None
    taken: dict[int, list[object]] = field(default_factory=dict)
    talkative: set[int] = field(default_factory=set)  # ranks that take a request for stacks
    deaf: set[int] = field(default_factory=set)  # ranks that ignore SIGTERM
    ending: set[int] = field(default_factory=set)  # ranks that are about to end
    failing: set[int] = field(default_factory=set)  # ranks that have begun to end by failure
    watched: bool = False  # the ends of threads are told
    threads: dict[int, int] = field(default_factory=dict)  # a thread of each rank: it ends when this is closed
    steps: list[Callable[[], None]] = field(default_factory=list)
    channels: dict[int, Channel] = field(default_factory=dict)  # the ranks' ends
    peers: Peers = field(default_factory=Peers)
    calls: type[Calls] = OneCall
    _writers: dict[int, int] = field(default_factory=dict)
    _stacks: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.results = Results(self.size)
        self.ours, theirs = Channel.pair()
        self.parent, self.parent_end = socket.socketpair()
        self.ranks = [self._rank(index) for index in range(self.size)]
        self.pids = {rank.pid: rank.rank for rank in self.ranks}
        self.theirs = theirs
        spec: Any = SimpleNamespace(context=SimpleNamespace(environ={}), launch_id="", rank_start=0, cluster=None)
        inspection = Inspection(spec, self.ranks, self.results.board, lambda: self.now)
        inspection.due = NEVER  # nobody comes to look
        self.supervisor = Supervisor(
            Supervision(
                self.ranks,
                self.results,
                FakeServer(),  # type: ignore[arg-type]
                theirs,
                self.parent.fileno(),
                grace_period=5.0,
                inspection=inspection,
                peers=self.peers,
                system=System(
                    clock=lambda: self.now,
                    wait=self._wait,
                    end_children=lambda _spare: None,
                    group=self._signal,
                    process=self._signal,
                    stray=lambda _pid, _pidfd, _number: None,
                    request=lambda pid, _phase, _number: self.pids[pid] in self.talkative,
                    is_ending=lambda pid, _phase: self.pids[pid] in self.ending,
                    is_failing=lambda pid: self.pids[pid] in self.failing,
                    watch=self._watch,
                ),
            ),
            self.calls,
        )
        if self.calls is OneCall:  # else the caller says when
            deadline = Deadline().start(self.deadline, self.now)
            self.supervisor.launch.begin_only_call(None, self.deadline, deadline)
        self.supervisor._adopted.close()  # which would take the script's first pause
        if not self.watched:
            self.supervisor.launch.stopping.endings.close()

    def _watch(self, pid: int) -> list[int]:
        thread, self.threads[self.pids[pid]] = os.pipe()
        return [thread]

    def end_thread(self, rank: int) -> None:
        os.close(self.threads.pop(rank))

    def _rank(self, index: int) -> RankProcess:
        reader, writer = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which ends no call of theirs
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            code = os.read(reader, 1)
            os._exit(code[0] if code else 1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reader)
        self._writers[index] = writer
        self.results.board.phase_writer(index)(messages.Phase.RUNNING)
        stacks_in, self._stacks[index] = os.pipe2(os.O_NONBLOCK)
        channel, self.channels[index] = Channel.pair()
        return RankProcess(index, index, pid, os.pidfd_open(pid), channel, os.memfd_create("crash"), stacks_in)

    def end(self, rank: int, code: int = 0) -> None:
        os.write(self._writers[rank], bytes([code]))
        os.waitid(os.P_PID, self.ranks[rank].pid, os.WEXITED | os.WNOWAIT)

    def _signal(self, pid: int, number: int) -> None:
        rank = self.pids[pid]
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        if ended:
            return
        self.signals.append((rank, signal.Signals(number).name, self.now))
        if number == signal.SIGKILL or rank not in self.deaf:
            os.kill(pid, number)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def _wait(self, sources: list[int], patience: float | None) -> list[int]:
        """Takes the next step of the script; what is ready then, or the deadline, is what the agent sees."""
        from multiprocessing.connection import wait

        ready = wait(sources, 0)
        if not ready and self.steps:
            self.steps.pop(0)()
            ready = wait(sources, 0)
        if not ready and patience is None:
            raise AssertionError("the agent waits for ever and nothing will happen")
        if not ready:
            assert patience < float("inf")  # type: ignore[operator]
            self.now += patience or 0.0
        return ready  # type: ignore[return-value]

    def answer(self, rank: int, kind: AnswerKind = AnswerKind.VALUE, *, consequence: bool = False) -> None:
        self.results.queue.put(messages.Answer(rank, self.supervisor.launch.call.number, kind, consequence))

    def received(self, rank: int) -> Iterator[object]:
        """What the agent has sent to a rank by now."""
        while linux.wait_readable([self.channels[rank].fileno()], 0):
            try:
                record, fds = self.channels[rank].receive()
            except EOFError:
                return
            for fd in fds:
                os.close(fd)
            self.taken.setdefault(rank, []).append(record)
        yield from self.taken.get(rank, [])

    def run(self, *steps: Callable[[], None]) -> list[object]:
        self.steps = list(steps)
        self.supervisor.run()
        self.theirs.close()
        told = []
        while True:
            try:
                record, fds = self.ours.receive()
            except EOFError:
                break
            for fd in fds:
                os.close(fd)
            told.append(record)
        self._close()
        return told

    def _close(self) -> None:
        for writer in (*self._writers.values(), *self._stacks.values(), *self.threads.values()):
            os.close(writer)
        self.results.board.close()
        for end in (self.ours, self.parent, self.parent_end, *self.channels.values()):
            end.close()
        self.results.queue.close()


@pytest.fixture
def world() -> World:
    return World()


def gone(told: list[object]) -> dict[int, messages.RankGone]:
    return {record.rank: record for record in told if isinstance(record, messages.RankGone)}


def test_answers_are_passed_on_as_they_come_and_nobody_is_stopped(world: World) -> None:
    told = world.run(
        lambda: world.answer(2), lambda: world.answer(0), lambda: world.end(2),
        lambda: world.answer(1), lambda: world.end(0), lambda: world.end(1),
    )  # fmt: skip
    assert [record.rank for record in told if isinstance(record, messages.RankAnswered)] == [2, 0, 1]
    assert world.signals == []
    assert all(end.answered and not end.stopped and end.exitcode == 0 for end in gone(told).values())


def test_an_answer_to_another_call_is_none(world: World) -> None:
    def answer_late() -> None:
        world.results.queue.put(messages.Answer(1, -1, AnswerKind.ERROR))

    answers = [functools.partial(world.answer, rank) for rank in range(3)]
    ends = [functools.partial(world.end, rank) for rank in range(3)]
    told = world.run(answer_late, *answers, *ends)
    assert [record.kind for record in told if isinstance(record, messages.RankAnswered)] == [AnswerKind.VALUE] * 3
    assert world.signals == []


def test_a_visitor_is_not_taken_for_who_had_its_number_before() -> None:
    """The pipe of a rank that was reaped in the same step, for one: it was ready, and the visitor says nothing yet."""
    now, board = [0.0], Board.create(1)
    spec: Any = SimpleNamespace(context=SimpleNamespace(environ=os.environ), launch_id="visited", rank_start=0)
    inspection = Inspection(spec, [], board, lambda: now[0])
    now[0] = 1.0
    inspection.serve([])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
        visitor.connect(str(registry.home(os.environ) / "visited.sock"))
        os.close(number := os.dup(0))
        inspection.serve([*inspection.fds(), number])
        assert number in inspection.fds()
        visitor.send(b"nonsense")
        inspection.serve([number])
        assert number not in inspection.fds()
    inspection.close()
    board.close()


def test_a_program_without_a_handler_is_not_asked_for_stacks() -> None:
    """The signal would end it."""
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    try:
        assert not request_stacks(pid, messages.Phase.RUNNING, frames.STACK_SIGNAL)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_rank_that_has_not_taken_a_request_gets_no_second() -> None:
    """All that wait in the kernel would meet in the handler at once."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, {frames.STACK_SIGNAL})
        frames.answer_requests(writer)
        os.write(writer, b"!")
        while True:
            signal.pause()
    try:
        assert os.read(reader, 1) == b"!"
        asked = [request_stacks(pid, messages.Phase.RUNNING, frames.STACK_SIGNAL) for _ in range(2)]
        assert asked == [True, False]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)


def test_an_answer_leaves_alone_the_error_of_a_system_call() -> None:
    def ask() -> str:
        frames.answer_requests(os.open(os.devnull, os.O_WRONLY))
        libc = ctypes.CDLL(None, use_errno=True)
        found = []
        for number in (frames.STACK_SIGNAL, frames.ALL_STACKS_SIGNAL):
            ctypes.set_errno(errno.ENOENT)  # what libc's raise and the handler see, and give back
            libc["raise"](int(number))
            found.append(ctypes.get_errno())
        return repr(found)

    assert said_in_fork(ask) == repr([errno.ENOENT] * 2)


def test_stacks_that_came_too_late_are_not_taken_for_the_next() -> None:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    rank: Any = SimpleNamespace(stack_fd=reader, stacks="", pid=1)
    requests = StackRequests(lambda *_: True)
    os.write(writer, b"late")
    requests.ask(rank, messages.Phase.RUNNING)
    os.write(writer, b"new")
    requests.read([reader])
    assert rank.stacks == "new"
    for fd in (reader, writer):
        os.close(fd)


def test_a_signal_that_got_lost_is_sent_again() -> None:
    now, sent = [0.0], []
    reader, writer = os.pipe2(os.O_NONBLOCK)
    rank: Any = SimpleNamespace(stack_fd=reader, stacks="", pid=1)
    requests = StackRequests(lambda *asked: sent.append(asked) is None, lambda: now[0])
    for at in (0.0, STACKS_TIMEOUT / 2, STACKS_TIMEOUT, STACKS_TIMEOUT * 1.5):
        now[0] = at
        requests.ask(rank, messages.Phase.RUNNING)
    assert len(sent) == 2
    for fd in (reader, writer):
        os.close(fd)


def test_a_rank_whose_handler_is_at_work_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has written a part; or it has hardly run since it was asked, and may not have come to that."""
    now, sent, ran = [0.0], [], [1.0]
    reader, writer = os.pipe2(os.O_NONBLOCK)
    rank: Any = SimpleNamespace(stack_fd=reader, stacks="", pid=1)
    requests = StackRequests(lambda *asked: sent.append(asked) is None, lambda: now[0])
    monkeypatch.setattr(rank_process, "state_of", lambda _pid: "R")
    monkeypatch.setattr(rank_process, "_has_run", lambda _pid: ran[0])
    for at, has_run in ((0.0, 1.0), (1.0, 1.01), (2.0, 1.1)):
        now[0], ran[0] = at, has_run
        requests.ask(rank, messages.Phase.RUNNING)
        assert requests.starved() == (at < 2.0 or has_run == 1.1)
    assert len(sent) == 2
    os.write(writer, b"Current thread")
    requests.read([reader])
    now[0], ran[0] = 3.0, 2.0
    requests.ask(rank, messages.Phase.RUNNING)
    assert len(sent) == 2
    for fd in (reader, writer):
        os.close(fd)


@pytest.mark.parametrize("starved_until", [0.0, 1.0, 100.0])
def test_a_rank_that_gets_no_cpu_has_longer_to_show_its_stack(starved_until: float) -> None:
    now, asked_to_end = [0.0], list[float]()
    escalation = Escalation(
        lambda: now[0], 5.0, a_rank_ends=lambda: False, ask=lambda: None, waits=lambda: True,
        starved=lambda: now[0] < starved_until, request=lambda: asked_to_end.append(now[0]), force=lambda: None,
    )  # fmt: skip
    escalation.within(0.0)
    for _ in range(20):
        escalation.take_steps()
        now[0] = max(now[0], escalation.due())
    assert asked_to_end[0] == pytest.approx(
        {0.0: STACKS_TIMEOUT, 1.0: 4 * STACKS_TIMEOUT, 100.0: STARVED_TIMEOUT}[starved_until]
    )


def test_ranks_that_have_answered_may_end_when_all_have(world: World) -> None:
    may_end: list[bool] = []

    def then(act: Callable[[int], None], rank: int) -> Callable[[], None]:
        def step() -> None:
            may_end.append(messages.Release() in list(world.received(0)))
            act(rank)

        return step

    world.run(then(world.answer, 0), then(world.end, 2), then(world.answer, 1), then(world.end, 0), then(world.end, 1))
    assert may_end == [False, False, False, True, True]
    assert world.signals == []


def test_the_first_error_stops_the_others_at_once(world: World) -> None:
    told = world.run(lambda: world.answer(1, AnswerKind.ERROR), lambda: world.end(1, 1))
    assert world.signals == [(0, "SIGTERM", 100.0), (2, "SIGTERM", 100.0)]
    assert {rank: end.stopped for rank, end in gone(told).items()} == {0: True, 1: False, 2: True}


def test_a_death_stops_the_others_at_once(world: World) -> None:
    told = world.run(lambda: world.end(0, 3))
    assert world.signals == [(1, "SIGTERM", 100.0), (2, "SIGTERM", 100.0)]
    assert gone(told)[0].exitcode == 3


def test_a_death_after_the_value_stops_nobody(world: World) -> None:
    told = world.run(
        then(world.answer, 0), lambda: world.end(0, 3), then(world.answer, 1, 2), then(world.end, 1), then(world.end, 2)
    )
    assert world.signals == []
    assert gone(told)[0].exitcode == 3


def then(act: Callable[[int], None], *ranks: int) -> Callable[[], None]:
    return lambda: [act(rank) for rank in ranks] and None


def test_who_has_answered_and_does_not_end_is_ended(world: World) -> None:
    """No failure is told of."""
    world.deaf = {2}
    told = world.run(then(world.answer, 0, 1, 2), then(world.end, 0, 1))
    assert world.signals == [(2, "SIGTERM", 105.0), (2, "SIGKILL", 110.0)]
    assert {rank: end.stopped for rank, end in gone(told).items()} == {0: False, 1: False, 2: True}
    assert [record.rank for record in told if isinstance(record, messages.RankStacks)] == [2]


def test_a_deadline_after_the_last_answer_ends_who_does_not() -> None:
    world = World(deadline=3.0)
    told = world.run(then(world.answer, 0, 1, 2), then(world.end, 0, 1))
    assert world.signals == [(2, "SIGTERM", 103.0)]
    assert not [record for record in told if isinstance(record, messages.DeadlinePassed)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("caused", [True, False])
def test_the_other_machines_hear_of_a_death_after_the_value_as_the_cause(caused: bool) -> None:
    """Of a failure that looks like its consequence. They are not awaited any more, though the link lives on."""
    ours, theirs = Channel.pair()
    link: Any = SimpleNamespace(channel=ours, pid=5)
    world = World(peers=LinkedPeers(link, 3600.0))

    def fail() -> None:
        raised = messages.RemoteError("X", "", "", Phase.RUNNING, "", "", None)
        payload.write(world.ranks[1].answer_fd, raised)
        world.answer(1, AnswerKind.ERROR, consequence=caused)

    world.run(then(world.answer, 0), lambda: world.end(0, 3), fail)
    failure, _ = theirs.receive()
    assert failure.rank == (0 if caused else 1)
    assert failure.what.partition(" (")[0] == ("returned its value, then exited with code 3" if caused else "raised X")
    for end in (ours, theirs):
        end.close()


def test_the_other_machines_hear_of_the_cause_not_of_its_consequence() -> None:
    ours, theirs = Channel.pair()
    link: Any = SimpleNamespace(channel=ours, pid=5)
    world = World(peers=LinkedPeers(link, 60.0))

    def answer() -> None:
        lost = messages.RemoteError("RuntimeError", "Connection closed by peer", "", Phase.RUNNING, "h", "cpu", None)
        payload.write(world.ranks[0].answer_fd, lost)
        world.answer(0, AnswerKind.ERROR, consequence=True)

    world.run(answer, lambda: world.end(1, 3), lambda: world.end(0, 1))
    failure, _ = theirs.receive()
    assert (failure.rank, failure.exitcode) == (1, 3)
    for end in (ours, theirs):
        end.close()


def test_a_failed_rank_may_end_as_soon_as_the_others_are_asked_to(world: World) -> None:
    """Though these take their time."""
    world.deaf = {1, 2}
    released: list[bool] = []
    world.run(
        lambda: world.answer(0, AnswerKind.ERROR),
        lambda: released.append(messages.Release() in list(world.received(0))),
    )
    assert released == [True]
    assert {name for _, name, _ in world.signals} == {"SIGTERM", "SIGKILL"}


def test_an_end_without_an_answer_but_with_code_0_stops_nobody(world: World) -> None:
    told = world.run(
        lambda: world.end(0), lambda: world.answer(1), lambda: world.answer(2), lambda: world.end(1),
        lambda: world.end(2),
    )  # fmt: skip
    assert world.signals == []
    assert not gone(told)[0].answered


def test_a_consequence_waits_for_its_cause(world: World) -> None:
    world.run(lambda: world.answer(0, AnswerKind.ERROR, consequence=True), lambda: world.end(0, 1))
    assert {at for _, _, at in world.signals} == {100.0}  # its death with code 1 is news of its own


def test_a_consequence_is_held_for_a_moment_only(world: World) -> None:
    world.run(lambda: world.answer(0, AnswerKind.ERROR, consequence=True), lambda: None, lambda: world.end(0, 1))
    assert world.signals == [(1, "SIGTERM", 100.0 + CAUSE_DELAY), (2, "SIGTERM", 100.0 + CAUSE_DELAY)]


def test_a_consequence_is_held_longer_while_a_rank_is_about_to_end(world: World) -> None:
    world.ending = {1}
    consequence, pause = functools.partial(world.answer, 0, AnswerKind.ERROR, consequence=True), lambda: None
    told = world.run(consequence, pause, lambda: world.end(1, 6), lambda: world.end(0, 1))
    assert (gone(told)[1].exitcode, gone(told)[1].stopped) == (6, False)
    assert world.signals == [(2, "SIGTERM", pytest.approx(100.0 + CAUSE_DELAY))]


def test_a_rank_that_is_about_to_end_is_not_waited_for_without_end(world: World) -> None:
    world.ending = {1}
    world.run(functools.partial(world.answer, 0, AnswerKind.ERROR, consequence=True), lambda: None, lambda: None)
    assert world.signals[0] == (1, "SIGTERM", pytest.approx(100.0 + CAUSE_DELAY + END_DELAY))


def test_ranks_that_stay_wait_for_one_that_is_about_to_end() -> None:
    world = World(calls=RepeatedCalls)
    world.ending = {1}
    consequence, pause = functools.partial(world.answer, 0, AnswerKind.ERROR, consequence=True), lambda: None
    told = world.run(lambda: begin(world, 1), consequence, pause, lambda: world.end(1, 6))
    assert (gone(told)[1].exitcode, gone(told)[1].stopped) == (6, False)


def test_prepared_ranks_leave_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first look, long before they have waited too long."""
    monkeypatch.setattr(linux, "memory_is_short", lambda: True)
    world = World(size=1, calls=PreparedCall, deaf={0})
    world.run()
    _, last, at = world.signals[-1]
    assert (last, at < 100.0 + WAIT_LIMIT) == ("SIGKILL", True)


@pytest.mark.parametrize("execs", [False, True])
def test_a_rank_that_is_about_to_end(execs: bool) -> None:
    """It has become another program, or is a zombie."""
    (heard, say), (hear, said) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(said)
        os.dup2(hear, 0)
        os.dup2(say, 1)
        frames.answer_requests(1)
        if execs:
            os.execv("/bin/cat", ["cat"])
        while data := os.read(0, 1):
            os.write(1, data)
        os._exit(0)
    try:
        os.write(said, b"!")
        assert os.read(heard, 1) == b"!"
        assert is_ending(pid, Phase.RUNNING) == execs
        assert not is_ending(pid, Phase.STARTING)  # when no rank has the handler yet
    finally:
        for fd in (said, hear, say, heard):
            os.close(fd)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert is_ending(pid, Phase.STARTING)
        os.waitpid(pid, 0)


def begin_to_fail(world: World, rank: int) -> None:
    world.failing.add(rank)
    world.end_thread(rank)


def test_a_rank_that_begins_to_fail_is_the_cause_though_it_ends_last() -> None:
    """Its memory may take long. The others are not left to see their connections close."""
    world = World(watched=True, deaf={0})

    def nothing() -> None: ...

    told = world.run(nothing, lambda: begin_to_fail(world, 1), nothing, lambda: world.end(1, 6))
    ended = {record.rank: record for record in told if isinstance(record, messages.RankGone)}
    assert (ended[1].stopped, ended[1].exitcode, ended[1].at) == (False, 6, 100.05)
    assert [ended[0].stopped, ended[2].stopped] == [True, True]
    assert world.signals == [(0, "SIGTERM", 100.05), (2, "SIGTERM", 100.05), (0, "SIGKILL", 105.05)]
    assert {record.rank for record in told if isinstance(record, messages.RankStacks)} == {0, 2}


def test_a_thread_that_ends_is_no_failure() -> None:
    world = World(watched=True, size=1)
    world.run(lambda: None, lambda: world.end_thread(0), lambda: world.answer(0), lambda: world.end(0))
    assert world.signals == []


def test_threads_are_not_watched_where_other_machines_want_to_know_why() -> None:
    """They hear of the first failure as the others are stopped, and it is known once the rank has ended."""
    ours, theirs = Channel.pair()
    link: Any = SimpleNamespace(channel=ours, pid=5)
    world = World(watched=True, peers=LinkedPeers(link, 60.0))
    assert world.supervisor.launch.stopping.endings.due == NEVER
    world.run(lambda: world.end(1, 3))
    failure, _ = theirs.receive()
    assert (failure.rank, failure.exitcode) == (1, 3)
    for end in (ours, theirs):
        end.close()


def test_ranks_that_have_answered_are_watched_no_more() -> None:
    world = World(watched=True, size=1)
    endings, watched = world.supervisor.launch.stopping.endings, list[int]()

    def answer() -> None:
        watched.extend(endings.fds())
        world.answer(0)

    def end() -> None:
        assert not endings.fds()
        world.end(0)

    world.run(lambda: None, answer, end)
    assert linux.identities(watched) == {watched[0]: None}


@pytest.mark.parametrize("code", [0, 3, -signal.SIGKILL])
def test_ends_of_threads_tell_of_a_process(code: int) -> None:
    pid, end = fork_with_a_thread()
    assert not is_failing(pid)
    watched = watch_threads(pid)
    if code < 0:
        os.kill(pid, -code)
    else:
        os.write(end, bytes([code]))
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    ended = wait_readable(watched, 0.0)
    assert is_failing(pid) == bool(code)
    os.waitpid(pid, 0)
    for fd in (*watched, end):
        os.close(fd)
    if not watched:
        pytest.skip("this kernel tells nothing of threads; Linux 6.9 does")
    assert ended == watched
    assert len(watched) == 2


def fork_with_a_thread() -> tuple[int, int]:
    """Returns the pid, and a pipe on which it awaits with which code to exit."""
    (reader, writer), (is_ready, ready) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        os.write(ready, b"!")
        os._exit(os.read(reader, 1)[0])
    os.read(is_ready, 1)
    for fd in (reader, is_ready, ready):
        os.close(fd)
    return pid, writer


def test_nothing_is_told_of_threads_where_proc_numbers_them_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process.os, "readlink", lambda _: "1")
    assert watch_threads(os.getpid()) == []


def test_another_consequence_does_not_hold_the_first_longer(world: World) -> None:
    def answer_later() -> None:
        world.now += CAUSE_DELAY / 2
        world.answer(1, AnswerKind.ERROR, consequence=True)

    first, end = (
        functools.partial(world.answer, 0, AnswerKind.ERROR, consequence=True),
        functools.partial(world.end, code=1),
    )
    world.run(first, answer_later, lambda: None, lambda: end(0), lambda: end(1))
    assert world.signals == [(2, "SIGTERM", pytest.approx(100.0 + CAUSE_DELAY))]


def test_a_rank_that_ignores_sigterm_is_killed_when_grace_ends(world: World) -> None:
    world.deaf = {2}
    world.run(lambda: world.answer(0, AnswerKind.ERROR), lambda: world.end(0, 1))
    assert world.signals == [(1, "SIGTERM", 100.0), (2, "SIGTERM", 100.0), (2, "SIGKILL", 105.0)]


def test_an_end_while_they_are_being_stopped_does_not_lengthen_the_grace(world: World) -> None:
    def end_later() -> None:
        world.now += 2.0
        world.end(0, 1)

    world.deaf = {2}
    world.run(lambda: world.answer(0, AnswerKind.ERROR), end_later)
    assert world.signals == [(1, "SIGTERM", 100.0), (2, "SIGTERM", 100.0), (2, "SIGKILL", 105.0)]


def test_cancel_stops_all_and_force_skips_the_grace(world: World) -> None:
    world.deaf = {0, 1, 2}
    world.run(lambda: world.ours.send(messages.Cancel()), lambda: world.ours.send(messages.Cancel(force=True)))
    assert [name for _, name, _ in world.signals] == ["SIGTERM"] * 3 + ["SIGKILL"] * 3
    assert {at for _, _, at in world.signals} == {100.0}


def test_a_lost_parent_stops_all(world: World) -> None:
    told = world.run(lambda: world.parent_end.shutdown(socket.SHUT_RDWR))
    assert [name for _, name, _ in world.signals] == ["SIGTERM"] * 3
    assert all(end.stopped for end in gone(told).values())


def test_a_rank_that_has_answered_is_left_to_end_by_itself(world: World) -> None:
    told = world.run(lambda: world.answer(0), lambda: world.answer(1, AnswerKind.ERROR), lambda: world.end(0))
    assert (0, "SIGTERM", 100.0) not in world.signals
    assert gone(told)[0].exitcode == 0


def test_stacks_are_asked_for_and_waited_for_a_moment(world: World) -> None:
    world.talkative = {0, 2}
    frames = ("t.py", 8, "train"), (BOTTOM, 1, "run")
    text = HEAD
    text += "".join(f'  File "{file}", line {line} in {name}\n' for file, line, name in frames)
    told = world.run(
        lambda: world.answer(1, AnswerKind.ERROR),
        lambda: world.end(1, 1),
        lambda: os.write(world._stacks[2], text.encode()),
    )
    dumps = {record.rank: record.text for record in told if isinstance(record, messages.RankStacks)}
    assert dumps == {0: "", 2: text}
    assert [(rank, at) for rank, _, at in world.signals] == [(0, 100.0 + STACKS_TIMEOUT), (2, 100.0 + STACKS_TIMEOUT)]


def test_long_stacks_keep_their_end(world: World) -> None:
    """The main thread's stands there, and says where the rank was."""
    world.talkative = {0, 2}
    frames = f'  File "t.py", line 8 in train\n  File "{BOTTOM}", line 1 in run\n'
    bottom = f"{HEAD}{frames}"
    text = "Thread 0x2 (most recent call first):\n" + '  File "other.py", line 3 in work\n' * 1500 + bottom
    assert TEXT_LIMIT < len(text) < 65536  # what a pipe holds
    told = world.run(
        lambda: world.answer(1, AnswerKind.ERROR),
        lambda: world.end(1, 1),
        lambda: os.write(world._stacks[2], text.encode()),
    )
    [dump] = [record.text for record in told if isinstance(record, messages.RankStacks) and record.rank == 2]
    assert dump.endswith(bottom)
    assert len(dump) <= TEXT_LIMIT


def test_a_stack_is_read_to_its_end_however_it_is_written(world: World) -> None:
    """Also where it names its bottom in one piece, and the rest of the line in another, or follows an earlier one."""
    world.talkative = {0, 2}
    text = f'" line 1 in run\n{HEAD}  File "t.py", line 8 in train\n  File "{BOTTOM}", line 1 in run\n'
    before, rest = text[: text.index(BOTTOM) + len(BOTTOM)], text[text.index(BOTTOM) + len(BOTTOM) :]
    told = world.run(
        lambda: world.answer(1, AnswerKind.ERROR), lambda: world.end(1, 1),
        lambda: os.write(world._stacks[2], before.encode()), lambda: os.write(world._stacks[2], rest.encode()),
    )  # fmt: skip
    [dump] = [record.text for record in told if isinstance(record, messages.RankStacks) and record.rank == 2]
    assert frames.main_frames(dump) == [("t.py", "8", "train")]
    assert frames.main_frames(before) == [("t.py", "8", "train")]


def test_a_deadline_while_a_consequence_is_held() -> None:
    """The failure was told first, so that is how the launch ended."""
    world = World(deadline=CAUSE_DELAY / 2)
    told = world.run(lambda: world.answer(0, AnswerKind.ERROR, consequence=True), lambda: None, lambda: world.end(0, 1))
    kinds = [type(record) for record in told if isinstance(record, messages.RankAnswered | messages.DeadlinePassed)]
    assert kinds == [messages.RankAnswered, messages.DeadlinePassed]
    assert {at for _, _, at in world.signals} == {100.0 + CAUSE_DELAY / 2}


def test_nobody_waits_once_all_stacks_are_there(world: World) -> None:
    world.talkative = {0, 2}
    text = f'{HEAD}  File "{BOTTOM}", line 1 in run\n'.encode()
    world.run(
        lambda: world.answer(1, AnswerKind.ERROR), lambda: world.end(1, 1),
        lambda: os.write(world._stacks[2], text), lambda: os.write(world._stacks[0], text),
    )  # fmt: skip
    assert world.signals == [(0, "SIGTERM", 100.0), (2, "SIGTERM", 100.0)]


def test_the_deadline_stops_all() -> None:
    world = World(deadline=60.0)
    told = world.run(lambda: world.answer(1), lambda: world.end(1))
    assert [record for record in told if isinstance(record, messages.DeadlinePassed)]
    assert world.signals == [(0, "SIGTERM", 160.0), (2, "SIGTERM", 160.0)]


def test_no_deadline_passes_while_somebody_debugs() -> None:
    """What that takes is not the call's."""
    world = World(deadline=60.0, size=1)

    def pass_time(seconds: float, *, held: bool) -> None:
        world.now += seconds
        world.ours.send(ForPart("debug", 0, HoldDeadline(held)))

    told = world.run(
        lambda: pass_time(50.0, held=True),
        lambda: pass_time(1000.0, held=False),
        lambda: world.answer(0),
        lambda: world.end(0),
    )
    assert not [record for record in told if isinstance(record, messages.DeadlinePassed)]
    assert world.signals == []


def test_no_deadline_passes_once_the_ranks_are_being_stopped() -> None:
    world = World(deadline=2.0, deaf={0})
    told = world.run(lambda: world.answer(1, AnswerKind.ERROR), lambda: world.end(1, 1))
    assert not [record for record in told if isinstance(record, messages.DeadlinePassed)]
    assert world.signals[-1] == (0, "SIGKILL", 105.0)


# Ranks that stay


def begin(world: World, number: int) -> None:
    memfd = os.memfd_create("call")
    world.ours.send(NextCall(number, None), [memfd])
    os.close(memfd)


def end_ranks(world: World) -> None:
    world.ours.send(EndRanks())


@dataclass
class Listener:
    """A launcher that looks, when it hears of a rank, whether that rank has heard of something before."""

    rank_end: Channel
    heard_before: list[bool] = field(default_factory=list)

    def try_send(self, _record: object, _fds: object = ()) -> None:
        self.heard_before.append(bool(wait_readable([self.rank_end.fileno()], 0.0)))


@pytest.mark.parametrize("stays", [True, False])
def test_a_rank_that_can_be_called_has_where_to_write(monkeypatch: pytest.MonkeyPatch, stays: bool) -> None:
    """Its launcher sends calls by itself, and the first may have a value that is too large for the queue."""
    channel, rank_end = Channel.pair()
    rank = RankProcess(0, 0, os.getpid(), os.pidfd_open(os.getpid()), channel, os.memfd_create("crash"), -1)
    for part, result in (("_prepare", SimpleNamespace(readers=[])), ("_fork", rank.pid), ("_adopt", rank)):
        monkeypatch.setattr(fork_ranks_module, part, lambda *_, result=result: result)
    listener = Listener(rank_end)
    context = SimpleNamespace(spec=SimpleNamespace(local_world_size=1, stays=stays), owned=SimpleNamespace(close=print))
    fork_ranks_module.fork_ranks(cast(Any, context), cast(Any, listener))
    assert listener.heard_before == [stays]  # one that does not stay gets it with its call
    rank.close()
    rank_end.close()


# While ranks are forked


@dataclass
class Forking:
    """Ranks that are forked by ones; before the next one ``between`` says how little memory is left."""

    monkeypatch: pytest.MonkeyPatch
    between: Callable[[], str]
    forked: int = 0

    def fork(self, *_: object) -> int:
        self.forked += 1
        return os.getpid()

    def watches(self, launcher: Channel, parent: int, due: float) -> list[Any]:
        """Forks eight at most; returns what the launcher has said."""
        pidfd, crash = os.pidfd_open(os.getpid()), os.memfd_create("crash")
        rank = RankProcess(0, 0, os.getpid(), pidfd, Channel.pair()[0], crash, -1)
        pending = SimpleNamespace(readers=[])
        for part, does in (("_prepare", lambda *_: pending), ("_fork", self.fork), ("_adopt", lambda *_: rank)):
            self.monkeypatch.setattr(fork_ranks_module, part, does)
        self.monkeypatch.setattr(fork_ranks_module, "_AT_ONCE", 1)
        self.monkeypatch.setattr(fork_ranks_module.machine_limits, "runs_short", self.between)
        watch = fork_ranks_module.EarlyWatch(launcher, parent, OwnedFds(), Deadline(due))
        context = SimpleNamespace(spec=SimpleNamespace(local_world_size=8, stays=False), owned=OwnedFds(), watch=watch)
        try:
            fork_ranks_module.fork_ranks(cast(Any, context), launcher)
        finally:
            rank.close()
        return [record for record, _ in watch.said]


@pytest.fixture
def parent() -> Iterator[tuple[int, int]]:
    """A process that waits to be killed, by pid and pidfd."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    pidfd = os.pidfd_open(pid)
    yield pid, pidfd
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
    os.waitpid(pid, 0)


ASKED = [ForPart(NAME, 0, AskToStop("asked")), Cancel()]


@pytest.mark.parametrize(
    ("how", "forked", "said"),
    [
        ("the launcher is gone", 2, [None]),
        ("the launcher cancels", 2, ASKED),
        ("the launcher says something else", 8, ASKED[:1]),
        ("the fork server is gone", 2, []),
        ("the deadline passes", 2, []),
    ],
)
def test_forking_ends_with_who_wants_it(
    how: str, forked: int, said: list[Any], monkeypatch: pytest.MonkeyPatch, parent: tuple[int, int]
) -> None:
    ours, theirs = Channel.pair()

    def happens() -> str:
        if how == "the launcher is gone":
            ours.close()
        elif how == "the fork server is gone":
            os.kill(parent[0], signal.SIGKILL)
            wait_readable([parent[1]], 60)
        elif forking.forked == 1:
            for record in said:
                ours.send(record)
        return ""

    forking = Forking(monkeypatch, happens)
    due = float("-inf") if how == "the deadline passes" else NEVER
    assert forking.watches(theirs, parent[1], due) == said
    assert forking.forked == (forked if due == NEVER else 1)
    ours.close()
    theirs.close()


def test_forking_ends_where_memory_runs_short(monkeypatch: pytest.MonkeyPatch, parent: tuple[int, int]) -> None:
    ours, theirs = Channel.pair()
    with pytest.raises(NoLaunchError):
        Forking(monkeypatch, lambda: "only 1 KiB of 2 KiB of memory is left").watches(theirs, parent[1], NEVER)
    while not isinstance(told := ours.receive()[0], Refused):
        pass
    assert told.text == "only 1 KiB of 2 KiB of memory is left after 1 of 8 ranks were forked; give fewer ranks"
    ours.close()
    theirs.close()


def test_a_rank_whose_agent_is_gone_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """The kernel closes the agent's end before it ends the rank."""
    agent_end, rank_end = Channel.pair()
    pid = os.fork()
    if pid == 0:
        try:
            agent_end.close()
            rank = Rank.__new__(Rank)
            rank._args = cast(Any, SimpleNamespace(channel=rank_end))
            rank._next_task()
        finally:
            os._exit(3)
    rank_end.close()
    agent_end.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert capfd.readouterr() == ("", "")


def overs(told: list[object]) -> list[CallOver]:
    return [record for record in told if isinstance(record, CallOver)]


def test_the_end_of_a_call_that_is_over_ends_no_other() -> None:
    """It was asked for before its caller had heard that it was over."""
    world = World(calls=RepeatedCalls)
    answers = [functools.partial(world.answer, rank) for rank in range(3)]
    told = world.run(
        lambda: begin(world, 5), *answers, lambda: begin(world, 6), lambda: world.ours.send(EndCall(5)), *answers,
        lambda: end_ranks(world),
    )  # fmt: skip
    first, second = overs(told)
    assert (first.number, second.number) == (5, 6)
    assert not [record for record in told[: told.index(second)] if isinstance(record, messages.RankStacks)]


def test_what_a_rank_has_answered_is_told_before_the_end_of_another() -> None:
    """It is kept back where nothing has failed, and would be lost with the ranks."""
    world = World(calls=RepeatedCalls)
    told = world.run(lambda: begin(world, 5), lambda: world.answer(0), lambda: world.end(1, 3))
    kinds = [type(record) for record in told]
    assert kinds.index(messages.RankAnswered) < kinds.index(messages.RankGone)


def test_the_end_of_a_call_is_that_of_the_request_to_stop_it() -> None:
    """Whose time would else be over in a call that nobody has asked to stop."""
    world, cleared, seen = World(size=1, calls=RepeatedCalls), list[int](), list[int]()
    world.supervisor._parts.over = lambda: cleared.append(world.supervisor.launch.call.number)  # type: ignore[method-assign]
    answer = functools.partial(world.answer, 0)

    def begin_the_next() -> None:
        seen.extend(cleared)
        begin(world, 6)

    world.run(lambda: begin(world, 5), answer, begin_the_next, answer, lambda: end_ranks(world))
    assert seen[-1] == 5


def test_a_deadline_that_the_launcher_has_kept() -> None:
    """It is as if the agent had; of a call that is over nothing but this is said."""
    world = World(calls=RepeatedCalls)
    answers = [functools.partial(world.answer, rank) for rank in range(3)]
    told = world.run(
        lambda: begin(world, 5), *answers, lambda: world.ours.send(EndCall(5, 2.0)), lambda: begin(world, 6),
        lambda: world.ours.send(EndCall(6, 3.0)), lambda: end_ranks(world),
    )  # fmt: skip
    passed = [told.index(record) for record in told if isinstance(record, messages.DeadlinePassed)]
    assert [over.number for over in overs(told[: passed[0]])] == [5, 5]
    assert len(passed) == 1
    assert any(isinstance(record, messages.RankStacks) for record in told)


def test_answers_of_more_ranks_than_one_record_carries() -> None:
    world = World(size=FD_LIMIT + 2, calls=RepeatedCalls)
    answers = [functools.partial(world.answer, rank) for rank in range(world.size)]
    told = world.run(lambda: begin(world, 1), *answers, lambda: end_ranks(world))
    before = [record.rank for record in told if isinstance(record, messages.RankAnswered)]
    [over] = overs(told)
    assert [*before, *(answer.rank for answer in over.answers)] == list(range(world.size))


def test_a_call_that_begins_as_a_rank_is_gone() -> None:
    """Its caller has not heard of that yet."""
    world = World(calls=RepeatedCalls)
    heard: list[object] = []

    def hear_and_end() -> None:
        heard.extend(world.received(1))
        world.end(1)

    told = world.run(lambda: world.end(0, 3), lambda: begin(world, 1), hear_and_end, lambda: world.end(2))
    assert {rank: end.exitcode for rank, end in gone(told).items()} == {0: 3, 1: 0, 2: 0}
    assert messages.Release() in heard
    assert not any(isinstance(record, messages.RunCall) for record in heard)


@pytest.mark.timeout(60)  # it would be looked at for ever
def test_a_rank_that_does_not_come_back_is_lost_when_grace_ends() -> None:
    """However often it is looked at meanwhile."""
    world = World(calls=RepeatedCalls)
    world.run(lambda: begin(world, 1), lambda: world.ours.send(EndCall(1)))
    assert {(name, round(at)) for _, name, at in world.signals} == {("SIGTERM", 105)}


def test_numbers_that_were_told_too_late_are_not_taken_for_the_next() -> None:
    (ours, theirs), before = Channel.pair(), len(os.listdir("/proc/self/fd"))
    questions = Questions({0: ours})
    numbers = NumberRequests(questions)
    asked = []
    for _ in range(2):
        numbers.ask(1)
        question, [memfd] = theirs.receive()
        asked.append(question.number)
        os.close(memfd)
    theirs.send(Told(asked[0]))
    questions.read([ours.fileno()])
    assert numbers.pending
    numbers.clear()
    assert not numbers.pending
    assert len(os.listdir("/proc/self/fd")) == before
    for end in (ours, theirs):
        end.close()


@pytest.mark.parametrize(
    ("told", "agree"),
    [
        ([{"g": ((0, 1), 3)}, {"g": ((0, 1), 3)}], True),
        ([{"g": ((0, 1), 3)}, {"g": ((0, 1), 4)}], False),
        ([{"g": ((0, 1), 0)}, {}], False),  # which one of its members has not made
        ([{"g": ((0,), 5)}, {}], True),
        ([{"g": ((0, 1), None)}, {"g": ((0, 1), None)}], False),  # of a backend that does not number
        ([{"g": ((0,), None)}, {"h": ((1,), None)}], True),  # where nobody else could be elsewhere
    ],
)
def test_ranks_are_in_step_by_their_numbers(told: list[Numbers], agree: bool) -> None:
    assert in_step.agree(told) is agree


def test_each_backend_of_a_group_is_asked_for_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group itself knows that of one."""
    pytest.importorskip("torch", reason="the groups are torch's")
    numbers = {"cpu": 1, "cuda": 1}

    def backend_of(device: Any) -> Any:
        return SimpleNamespace(
            _get_sequence_number_for_group=lambda: numbers[device.type], _get_backend_name=lambda: "nccl"
        )

    kinds = [SimpleNamespace(type=kind) for kind in numbers]
    group: Any = SimpleNamespace(_device_types=kinds, _get_backend=backend_of, _get_sequence_number_for_group=lambda: 1)
    monkeypatch.setattr(process_groups, "by_name", lambda: {"g": group})
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda _: [0, 1])
    in_step.begin_call(1)
    before = in_step.since_the_call()
    assert in_step.agree([before, before])
    numbers["cpu"] += 1
    assert not in_step.agree([before, in_step.since_the_call()])


def test_the_directory_of_a_killed_agent_is_removed_whether_it_is_there_or_not(tmp_path: Path) -> None:
    spec: Any = SimpleNamespace(target=SimpleNamespace(error_dir="", temporary=str(tmp_path)), launch_id="x")
    (tmp_path / "mlaunch-run-x").mkdir()
    (tmp_path / "mlaunch-run-x" / "0.json").touch()
    launch_files.remove_error_directory(spec)
    assert not any(tmp_path.iterdir())
    launch_files.remove_error_directory(spec)
    for _ in range(2):
        (tmp_path / "its").mkdir(exist_ok=True)
        if (pid := os.fork()) == 0:
            os._exit(3)
        child = Child(pid, os.pidfd_open(pid), None, directory=str(tmp_path / "its"))
        assert os.waitstatus_to_exitcode(child.reap()) == 3
        os.close(child.pidfd)
        assert not any(tmp_path.iterdir())


def test_a_record_goes_where_its_launcher_wants_it_though_nothing_is_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "0.json"
    launch_files.write_error(str(path), {"message": {"message": "no such luck"}}, 3)
    assert json.loads(path.read_text()) == {"message": {"message": "no such luck", "errorCode": 3}}
