"""The thread of a rank that answers its agent whatever the rank does."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest

from mlaunch.agent.questions import EnteredRequests, Questions
from mlaunch.base import linux
from mlaunch.protocol import payload
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import Ask, Told
from mlaunch.rank import control
from mlaunch.torch_parts import process_groups
from tests.conftest import TORCH
from tests.processes import said_in_fork

LIMIT = 60.0  # seconds


def ask(questions: Questions) -> list[object]:
    told: list[object] = []
    questions.ask(0, Ask.NUMBERS, lambda _rank, answer: told.append(answer), 5)
    assert linux.wait_readable(questions.fds(), LIMIT)
    questions.read(questions.fds())
    return told


@pytest.mark.skipif(not TORCH, reason="the numbers are those of torch's groups")
def test_the_control_thread_takes_no_signal_that_the_main_thread_waits_for() -> None:
    """And it ends with its agent."""
    # Blocked during the fork, for threads that a library may start in each fork: they would take it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

    def wait_for_one() -> str:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        ours, theirs = Channel.pair()
        control.start(theirs)
        questions = Questions({0: ours})
        told = ask(questions)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        os.kill(os.getpid(), signal.SIGUSR1)
        got = signal.sigtimedwait([signal.SIGUSR1], LIMIT)
        told += ask(questions)
        threads = len(os.listdir("/proc/self/task"))
        ours.close()
        while len(os.listdir("/proc/self/task")) == threads:
            os.sched_yield()
        return f"{told} {signal.Signals(got.si_signo).name if got else got}"

    try:
        assert said_in_fork(wait_for_one) == "[{}, {}] SIGUSR1"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_entered_operations_are_asked_anew_each_time() -> None:
    ours, theirs = Channel.pair()
    questions = Questions({0: ours})
    entered = EnteredRequests(questions)
    numbers = []
    for _ in range(2):
        entered.ask()
        for _ in range(2):
            question, [memfd] = theirs.receive()
            numbers.append(question.number)
            payload.write(memfd, len(numbers) if question.about is Ask.TURNS else (("0 cpu", (0, 1), 2),))
            os.close(memfd)
    for number in numbers:
        theirs.send(Told(number))
        assert entered.pending
        questions.read([ours.fileno()])
    assert not entered.pending
    assert (entered.told, entered.turns) == ({0: (("0 cpu", (0, 1), 2),)}, {0: 4})
    for end in (ours, theirs):
        end.close()


def test_a_rank_that_answers_nothing_is_asked_for_days() -> None:
    """One that was stopped, or whose C code holds the interpreter lock: 92 looks filled its channel, and its agent
    waited there, deaf to the deadline and to its caller."""
    ours, theirs = Channel.pair()
    questions = Questions({0: ours})
    entered, open_files = EnteredRequests(questions), len(os.listdir("/proc/self/fd"))
    for _ in range(1_000):
        entered.ask(place=True)
        assert entered.pending
    assert len(os.listdir("/proc/self/fd")) <= open_files + 3
    while linux.wait_readable([theirs.fileno()], 0.0):  # it goes on, and answers what it finds
        question, [memfd] = theirs.receive()
        payload.write(memfd, "late")
        os.close(memfd)
        theirs.send(Told(question.number))
        questions.read([ours.fileno()])
    assert not entered.told
    entered.ask()
    assert linux.wait_readable([theirs.fileno()], LIMIT)
    questions.forget(0)
    for end in (ours, theirs):
        end.close()


def test_a_group_that_is_half_made_is_none_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread asks for groups while the main thread makes one, and would end by an error of torch's."""
    world = SimpleNamespace(
        pg_map=dict.fromkeys(["made", "half made", "destroyed"]), pg_names={"made": "0", "half made": "1"},
        pg_group_ranks={"made": {0: 0}},
    )  # fmt: skip
    monkeypatch.setattr(process_groups, "_world", lambda: world)
    assert process_groups.by_name() == {"0": "made"}
