"""How ranks agree on the step at which they stop, on records, and on threads that stand for ranks."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import signal
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlaunch.agreed_stop import rank
from mlaunch.agreed_stop.agent import why_not
from mlaunch.agreed_stop.caller import ask_to_stop
from mlaunch.agreed_stop.rank import StopPoint, stopping
from mlaunch.agreed_stop.wire import (
    ANSWER_TIMEOUT,
    NAME,
    PAUSE,
    AgreedStop,
    AskAll,
    AskToStop,
    FreezeRanks,
    NobodyChecks,
    RanksFrozen,
    StopRanks,
    StopTerms,
    ThawRanks,
)
from mlaunch.base.text import signal_name, signals_of
from mlaunch.engines.caller.machines_requests import MachinesStop
from mlaunch.engines.member.machine_launch import SignalsHere
from mlaunch.machines import link as machines_link
from mlaunch.machines.gate.gate import GateStop
from mlaunch.protocol import this_rank
from mlaunch.protocol.messages import ForPart, PartSays
from mlaunch.ranks.caller.kept_call import KeptCall
from tests.conftest import TORCH
from tests.processes import said_in_fork


@dataclass
class Told:
    """Members, what they were told, and a clock that the test moves."""

    there: set[int] = field(default_factory=lambda: {0, 1, 2})
    said: list[tuple[str, int]] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.stop = AgreedStop(self, lambda: self.now)

    def working(self) -> Collection[int]:
        return sorted(self.there)

    def freeze(self, member: int) -> None:
        self.said.append(("freeze", member))

    def thaw(self, member: int) -> None:
        self.said.append(("thaw", member))

    def stop_at(self, member: int, check: int) -> None:
        self.said.append((f"stop at {check}", member))

    def take(self, **counts: int) -> bool:
        for name, count in counts.items():
            self.stop.freeze.take(int(name[1:]), count)
        return self.stop.take_steps()

    def news(self) -> list[tuple[str, int]]:
        news, self.said = self.said, []
        return news

    def pass_time(self) -> None:
        self.now = self.stop.due


def all_are(what: str, *members: int) -> list[tuple[str, int]]:
    return [(what, member) for member in members]


def test_all_stop_at_the_highest_count_plus_one() -> None:
    told = Told()
    told.stop.begin(10.0)
    assert not told.take(r0=4, r2=6)
    assert told.take(r1=5)
    assert told.news() == all_are("freeze", 0, 1, 2) + all_are("stop at 7", 0, 1, 2)
    assert told.stop.due == float("inf")


def test_a_rank_that_has_ended_need_not_agree() -> None:
    told = Told()
    told.stop.begin(10.0)
    told.take(r0=4, r2=6)
    told.there.remove(1)
    assert told.take()
    assert told.stop.check == 7


def test_a_rank_that_does_not_answer_holds_up_the_others_for_a_moment_only() -> None:
    """And then not at all: they agree without it, and it hears of that when it can."""
    told = Told()
    told.stop.begin(2 * (ANSWER_TIMEOUT + PAUSE))
    told.take(r0=4, r2=6)
    told.news()
    told.pass_time()
    assert not told.take()
    assert told.news() == all_are("thaw", 0, 2)
    told.pass_time()
    told.take()
    assert told.news() == all_are("freeze", 0, 2)  # the other one has that before it
    told.pass_time()
    told.take(r0=9, r2=9)
    told.take(r1=1)  # between two rounds
    assert all_are("thaw", 1)[0] in told.news()
    told.there.add(3)
    told.pass_time()
    told.take()
    told.take(r0=11, r1=2, r2=12)
    told.news()
    told.pass_time()
    assert told.take()
    assert told.news() == all_are("stop at 13", 0, 1, 2, 3)
    told.take(r3=0)
    assert told.news() == all_are("stop at 13", 3)


@pytest.mark.slow
@pytest.mark.parametrize("in_step", [True, False])
def test_threads_in_place_of_ranks_stop_at_the_same_check(in_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(7)
    for call in range(60):
        monkeypatch.setattr(this_rank, "call", call)
        points = [StopPoint(), StopPoint()]
        barrier = threading.Barrier(2 if in_step else 1)
        ended: list[int] = []

        def work(point: StopPoint, barrier: threading.Barrier = barrier) -> None:
            steps = 1
            while not point.check():
                barrier.wait(60)
                steps += 1
            ended.append(steps)  # noqa: B023 - the threads end before the next list

        threads = [threading.Thread(target=work, args=(point,), daemon=True) for point in points]
        for thread in threads:
            thread.start()
        while points[0].checks(call) < chance.randrange(50):
            pass
        counts = [point.freeze(call) for point in points]
        for point in points:
            point.stop_at(call, max(counts) + 1, "TERM")
        for thread in threads:
            thread.join(30)
        assert ended == [max(counts) + 1] * 2


def test_a_request_for_one_call_is_none_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = functools.partial(monkeypatch.setattr, this_rank, "call")
    begin(1)
    point = StopPoint()
    assert (point.check(), point.freeze(1)) == ("", 1)
    point.stop_at(1, 2, "asked")
    assert (point.check(), point.check()) == ("asked", "asked")
    begin(2)
    assert (point.checks(), point.check(), point.checks(2)) == (0, "", 1)
    assert point.freeze(3) == 0  # a call that has not come here yet
    point.stop_at(3, 1, "early")
    assert point.check() == ""
    begin(3)
    assert point.check() == "early"


def test_elsewhere_nothing_stops() -> None:
    assert not stopping()


@pytest.mark.parametrize(
    ("check", "checks", "said"),
    [
        (7, {0: 0, 1: 0}, "ranks 0-1 never called mlaunch.stopping()"),
        (7, {0: 7, 1: 6}, "rank 1 did not call mlaunch.stopping() again; rank 0 got the answer and continued"),
        (None, {0: 5, 1: None}, "rank 1 cannot answer (C code holds the interpreter lock, or the process is stopped)"),
        (
            90,
            {0: 88, 1: 12},
            "the ranks call mlaunch.stopping() unequally often (rank 0: 88 times, rank 1: 12 times; all stop at "
            "call 90)",
        ),
        (7, {}, ""),
    ],
)
def test_why_ranks_have_not_stopped(check: int | None, checks: dict[int, int | None], said: str) -> None:
    assert why_not(check, checks) == said


def test_signals_by_name() -> None:
    assert signals_of("", "TERM, sigusr1,TERM") == (15, 10)
    assert signal_name(15) == "TERM"


# Machines, whose caller agrees with all of them


class Visited:
    """What a MachinesStop asks of a MachinesInspection."""

    def __init__(self, *, stops: bool) -> None:
        signals = (signal.SIGUSR1,) if stops else ()
        self.launch = SimpleNamespace(sections={NAME: StopTerms(60.0, signals)})
        self.asked_by: int | None = None
        self.stopped_by: int | None = None

    def take_request(self) -> int | None:
        asked_by, self.asked_by = self.asked_by, None
        return asked_by


def machines_stop(visited: Visited) -> tuple[MachinesStop, list[Any], list[tuple[int, object]]]:
    sent: list[tuple[int, object]] = []

    def machine(number: int) -> Any:
        return SimpleNamespace(number=number, stream=SimpleNamespace(send=lambda record: sent.append((number, record))))

    machines = [machine(0), machine(1)]
    told: list[object] = []
    stop = MachinesStop(dict(enumerate(machines)), told.append, cast(Any, visited))
    return stop, [*machines, told], sent


def test_machines_agree_as_ranks_do() -> None:
    stop, [first, second, told], sent = machines_stop(Visited(stops=True))
    stop.ask("TERM", 0)
    stop.ask("TERM", 0)
    assert sent == [(number, ForPart(NAME, 0, FreezeRanks("TERM"))) for number in (0, 1)]
    sent.clear()
    stop.take(first, RanksFrozen(0, 3))
    stop.take(second, RanksFrozen(1, 8))  # of another call
    for checks in (True, -5, 10**4000, 1e300):
        stop.take(second, RanksFrozen(0, cast("int", checks)))
    assert stop.serve() is None
    stop.take(second, RanksFrozen(0, 5))
    assert stop.serve() is None
    assert sent == [(number, ForPart(NAME, 0, StopRanks(6, "TERM"))) for number in (0, 1)]
    assert [(record.news.reason, record.news.check) for record in told] == [("TERM", 6)]
    assert not stop.take(second, told[0].news)  # that is for the launch's handle


def test_a_signal_on_a_machine_asks_the_ranks_of_all() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    here = SignalsHere([signal.SIGUSR1])
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert [here.take(), here.take()] == ["USR1", ""]
    stop, [first, _, _], sent = machines_stop(Visited(stops=True))
    stop.take(first, AskToStop("\x1b[2J"))
    assert sent.pop() == (1, ForPart(NAME, 0, FreezeRanks(r"\x1b[2J")))
    stop, [first, _, _], sent = machines_stop(Visited(stops=True))
    stop.take(first, AskToStop("USR1"))
    assert sent == [(number, ForPart(NAME, 0, FreezeRanks("USR1"))) for number in (0, 1)]


@pytest.mark.parametrize(("checks", "unused"), [(0, True), (1, False)])
def test_a_launch_on_machines_that_does_not_check_is_ended(checks: int, unused: bool) -> None:
    visited = Visited(stops=False)
    stop, [first, second, _], _ = machines_stop(visited)
    visited.asked_by = 77
    assert stop.serve() is None
    stop.take(first, RanksFrozen(0, 0))
    stop.take(second, RanksFrozen(0, checks))
    assert stop.serve() == (77 if unused else None)


def test_a_call_that_waits_for_its_ranks_is_asked_as_it_begins() -> None:
    call = cast("KeptCall", KeptCall.__new__(KeptCall))
    call.words = []
    ask_to_stop(call, "TERM")
    passed_on: list[list[tuple[str, object]]] = []
    call.launch = cast(Any, SimpleNamespace(pass_words_on=lambda: passed_on.append(call.take_words())))
    ask_to_stop(call, "asked")
    assert passed_on == [[(NAME, AskToStop("TERM")), (NAME, AskToStop("asked"))]]


class Wire:
    """To a machine that has joined at the gate."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def is_closing(self) -> bool:
        return False

    def write(self, line: bytes) -> None:
        self.said.append(json.loads(line))


def said(news: object) -> dict[str, Any]:
    """What the gate gets of an agent's news."""
    return dict(machines_link.record_of(PartSays(NAME, news)))


NONSENSE: list[dict[str, Any]] = [
    {"stop": 3, "patience": 1}, {"stop": "x" * 101, "patience": 1}, {"stop": "", "patience": 1}, {"frozen": 5},
    {"stop": "a\x1bb", "patience": 1}, {"stop": "TERM"}, {"stop": "TERM", "patience": -1}, {"patience": 1},
    {"stop": "TERM", "patience": True}, {"stop": "TERM", "patience": 1e300}, {"stop": "TERM", "patience": 10**4000},
    {"stop": "TERM", "patience": float("nan")}, {"stop": "TERM", "patience": "1"}, {"stop": ["TERM"], "patience": 1},
]  # fmt: skip


def test_the_gate_agrees_with_machines_that_have_a_caller_each() -> None:
    """One that ends meanwhile is not waited for, and what makes no sense does nothing."""

    async def talk() -> None:
        stop, wires = GateStop(), [Wire(), Wire(), Wire()]
        for number, wire in enumerate(wires):
            stop.add(number, cast("Any", wire))
        for record in NONSENSE:
            stop.hear(0, record)
        assert [wire.said for wire in wires] == [[], [], []]
        stop.hear(1, said(AskAll("TERM", 60.0, unsure=False)))
        assert [wire.said for wire in wires] == [[{"freeze": "TERM"}]] * 3
        for checks in (True, -5, 10**4000, 1e300, 7.0):
            stop.hear(0, {"frozen": checks})
        stop.hear(0, said(RanksFrozen(0, 7)))
        stop.hear(1, said(RanksFrozen(0, 5)))
        assert len(wires[0].said) == 1
        stop.remove(2)
        assert [wire.said[-1] for wire in wires[:2]] == [{"stop_at": 8, "reason": "TERM"}] * 2

    asyncio.run(talk())


def test_the_gate_tells_who_asked_that_nobody_checks() -> None:
    async def talk() -> None:
        stop, wires = GateStop(), [Wire(), Wire()]
        for number, wire in enumerate(wires):
            stop.add(number, cast("Any", wire))
        stop.hear(1, said(AskAll("asked", 60.0, unsure=True)))
        for number in (0, 1):
            stop.hear(number, said(RanksFrozen(0, 0)))
        assert wires[0].said == [{"freeze": "asked"}, {"thaw": 1}]
        assert wires[1].said == [{"freeze": "asked"}, {"thaw": 1}, {"unused": 1}]

    asyncio.run(talk())


def test_orders_of_the_gate() -> None:
    orders: list[tuple[dict[str, Any], object]] = [
        ({"freeze": "TERM"}, FreezeRanks("TERM")), ({"thaw": 1}, ThawRanks()), ({"unused": 1}, NobodyChecks()),
        ({"stop_at": 8, "reason": "TERM"}, StopRanks(8, "TERM")),
    ]  # fmt: skip
    for record, order in orders:
        assert machines_link.order_of(record) == ForPart(NAME, 0, order)
    for check in ("8", True, -5, 10**4000, 1e300, 8.0, None):
        assert machines_link.order_of({"stop_at": check, "reason": "TERM"}) is None
    assert machines_link.order_of({"beat": 1}) is None


@pytest.mark.skipif(not TORCH, reason="its rank needs torch")
@pytest.mark.ranks(1)
def test_a_fork_of_a_rank_has_nothing_to_stop_at() -> None:
    rank._point.stop_at(this_rank.call, 1, "TERM")
    assert (stopping(), said_in_fork(lambda: f"{stopping()!r} {rank.turns()}")) == ("TERM", "'' 1")
    rank._point.stop_at(-1, 0, "")
