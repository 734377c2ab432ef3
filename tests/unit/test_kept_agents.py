"""Who hears all machines decides when a call on ranks that stay is over, whatever comes in which order."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlaunch.base.fds import memory_file
from mlaunch.engines.caller import kept_launch
from mlaunch.engines.caller.kept_launch import KeptAgents
from mlaunch.engines.caller.merged_agent import Patience
from mlaunch.engines.wire import FromAgent
from mlaunch.protocol import payload
from mlaunch.protocol.messages import (
    CallOver,
    Cancel,
    DeadlinePassed,
    EndCall,
    EndRanks,
    MeetAgain,
    NextCall,
    RankGone,
    RanksBack,
    RanksStand,
)
from mlaunch.rank.in_step import Numbers

WORLD = tuple(range(4))


class Agents(KeptAgents):
    """Of two machines with two ranks each. Its steps are taken one by one."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, object]] = []
        machines = [self._machine(number) for number in range(2)]
        inspection: Any = SimpleNamespace(end_request=lambda: None, launch=SimpleNamespace(sections={}))
        super().__init__(machines, 4, lambda _: ("", ""), Patience(1.0, None), inspection)
        self.all = machines

    def _machine(self, number: int) -> Any:
        def send(record: object, _content: int = -1) -> None:
            self.sent.append((number, record))

        stream = SimpleNamespace(fileno=lambda: number, send=send)
        return SimpleNamespace(
            number=number,
            place=number,
            ranks=range(2 * number, 2 * number + 2),
            host="",
            shifted=lambda record: record,
            stream=stream,
        )

    def hear(self, machine: int, record: object, content: object = None) -> None:
        memfd = memory_file("test")
        payload.write(memfd, content)
        self._take(self.all[machine], FromAgent(record), memfd)
        os.close(memfd)

    def begin(self, number: int) -> None:
        self._obey(NextCall(number, None), [])
        self.sent.clear()

    def say(self) -> object:
        """What the handle hears now; None: nothing."""
        said, self._unsaid = self._unsaid, None
        return said


def test_machines_that_say_no_last_word_are_ended() -> None:
    done: list[str] = []
    machines = SimpleNamespace(kill=lambda: done.append("killed"))
    merged = SimpleNamespace(join=lambda _seconds: "killed" in done)
    kept_launch._Servers(cast(Any, machines), cast(Any, merged), lambda: done.append("over")).close()
    assert done == ["killed", "over"]


def test_a_deadline_that_was_looked_at_before_it_passed_still_passes_once() -> None:
    times = Patience(1.0, 1000.0)
    assert times.take_due() == (False, False)
    left = times.milliseconds(math.inf)
    assert left is not None
    assert 0 < left <= 1_000_000
    times = Patience(1.0, 0.0)
    assert [times.take_due() for _ in range(2)] == [(False, True), (False, False)]
    assert times.milliseconds(math.inf) is None


def test_a_machine_that_does_not_answer_is_told_of_once_until_it_does() -> None:
    times = Patience(1.0, None, heartbeat_timeout=0.0)
    silent = [True, True]

    def is_silent(number: int) -> Callable[[float], bool]:
        return lambda _seconds: silent[number]

    machines = [
        cast(Any, SimpleNamespace(number=number, host=f"m{number}", pid=7 + number, is_silent=is_silent(number)))
        for number in range(2)
    ]
    texts = [news.news for news in times.news(machines, lambda _: ("", ""))]
    assert [text.split()[1] for text in texts] == ["m0", "m1"]
    assert texts[1].endswith("kill -CONT 8 there continues that")
    assert list(times.news(machines, lambda _: ("", ""))) == []
    silent[1] = False
    assert list(times.news(machines, lambda _: ("", ""))) == []
    silent[1] = True
    assert [news.news.split()[1] for news in times.news(machines, lambda _: ("", ""))] == ["m1"]
    assert Patience(1.0, None).milliseconds(math.inf) is None


def test_a_machine_that_does_not_answer_is_told_of_within_a_minute() -> None:
    """However long its lease: a call without a deadline waits for it, and somebody may be able to continue it."""
    for lease, seconds in ((3600.0, 25.0), (4.0, 2.0)):
        due = Patience(1.0, None, lease).milliseconds(math.inf)
        assert due is not None
        assert 0 < due <= 1000 * seconds


def told(**entered: int) -> dict[int, Numbers]:
    return {int(name[1:]): {"world": (WORLD, number)} for name, number in entered.items()}


@pytest.fixture
def agents() -> Iterator[Agents]:
    made = Agents()
    made.begin(1)
    yield made
    made._theirs.close()
    made.channel.close()
    made._board.close()
    os.close(made._nothing)


def test_a_call_is_over_when_all_machines_say_so(agents: Agents) -> None:
    agents.hear(1, CallOver(1))
    assert agents.say() is None
    agents.hear(0, CallOver(1))
    assert agents.say() == CallOver(1)
    assert agents.sent == []


def test_an_end_that_was_said_before_the_call_was_ended_does_not_count(agents: Agents) -> None:
    """The machines hear of the interrupt afterwards, and compare all the same."""
    agents._obey(EndCall(1), [])
    assert agents.sent == [(0, EndCall(1)), (1, EndCall(1))]
    for machine in (0, 1):
        agents.hear(machine, CallOver(1))
    assert agents.say() is None
    agents.hear(0, RanksBack(1), told(r0=3, r1=3))
    agents.hear(1, RanksBack(1), told(r2=3, r3=3))
    assert agents.sent[2:] == [(0, MeetAgain(1)), (1, MeetAgain(1))]
    agents.hear(0, CallOver(1))
    assert agents.say() is None
    agents.hear(1, CallOver(1))
    assert agents.say() == CallOver(1)


def test_a_machine_that_had_finished_before_another_one_failed(agents: Agents) -> None:
    agents.hear(1, CallOver(1))
    agents.hear(0, DeadlinePassed())
    agents.hear(1, RanksBack(1), told(r2=3, r3=3))
    agents.hear(0, RanksBack(1), told(r0=3, r1=3))
    agents.hear(0, CallOver(1))
    assert agents.say() is None
    agents.hear(1, CallOver(1))
    assert agents.say() == CallOver(1)


def test_an_end_that_is_wished_too_late_is_said_again(agents: Agents) -> None:
    for machine in (0, 1):
        agents.hear(machine, CallOver(1))
    assert agents.say() == CallOver(1)
    agents._obey(EndCall(1), [])
    assert (agents.say(), agents.sent) == (CallOver(1), [])


def test_a_deadline_ends_the_call_on_the_others(agents: Agents) -> None:
    agents.hear(1, DeadlinePassed())
    agents.hear(0, DeadlinePassed())
    assert agents.sent == [(0, EndCall(1))]


@pytest.mark.parametrize("number", [2, 4])
def test_numbers_that_differ(agents: Agents, number: int) -> None:
    agents._obey(EndCall(1), [])
    agents.sent.clear()
    agents.hear(0, RanksBack(1), told(r0=3, r1=3))
    assert agents.sent == []
    agents.hear(1, RanksBack(1), told(r2=3, r3=number))
    assert agents.sent == [(0, Cancel()), (1, Cancel())]


def test_ranks_that_wait_for_those_who_are_back(agents: Agents) -> None:
    """Those who are behind and still work may come."""
    agents._obey(EndCall(1), [])
    agents.sent.clear()
    agents.hear(0, RanksStand(1, ()), told(r0=3, r1=2))
    agents.hear(1, RanksStand(1, (3,)), told(r2=3, r3=3))
    assert agents.sent == []
    agents.hear(1, RanksBack(1), told(r2=3, r3=3))
    assert agents.sent == []
    agents.hear(0, RanksStand(1, ()), told(r0=4, r1=3))
    assert agents.sent == [(0, Cancel())]
    agents.hear(0, RankGone(0, 7, -15, cast(Any, None), False, True, 0.0, (), 0))
    assert agents.sent[1:] == [(0, Cancel()), (1, Cancel())]


def test_answers_of_one_call_are_not_told_of_the_next(agents: Agents) -> None:
    agents._obey(EndCall(1), [])
    agents.hear(0, RanksBack(1), told(r0=3, r1=3))
    agents.begin(2)
    agents.hear(0, CallOver(2))
    agents._obey(EndCall(2), [])
    agents.sent.clear()
    agents.hear(1, RanksBack(2), told(r2=1, r3=1))
    assert agents.sent == []
    agents.hear(0, RanksBack(2), told(r0=1, r1=1))
    assert agents.sent == [(0, MeetAgain(2)), (1, MeetAgain(2))]


def test_a_rank_that_ends_ends_all_once(agents: Agents) -> None:
    gone = RankGone(2, 7, 0, cast(Any, None), False, False, 0.0, (), 0)
    agents.hear(1, gone)
    agents.hear(1, gone)
    assert agents.sent == [(0, Cancel()), (1, Cancel())]


def test_ranks_that_leave_may_take_their_time(agents: Agents) -> None:
    agents._obey(EndRanks(), [])
    agents.hear(1, RankGone(2, 7, 0, cast(Any, None), False, False, 0.0, (), 0))
    assert agents.sent == [(0, EndRanks()), (1, EndRanks())]
