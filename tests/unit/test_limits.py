"""What a caller does by itself where nobody answers."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from mlaunch.base import linux
from mlaunch.base.deadline import NEVER, Deadline
from mlaunch.caller.launch import watchdog
from mlaunch.caller.launch.handle import LaunchHandle
from mlaunch.caller.launch.watchdog import Killed, Limits
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.output_plan import Policy
from mlaunch.caller.output.relay import Relay
from mlaunch.caller.report.launch_report import History
from mlaunch.core.load import adapted
from mlaunch.debug.caller import asking
from mlaunch.debug.wire import Visited
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import PartSays
from tests.unit.test_output import plan


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("deadline", [None, 1.0])
@pytest.mark.parametrize("force", [False, True])
def test_presses_of_ctrl_c_put_no_step_off(
    monkeypatch: pytest.MonkeyPatch, force: bool, deadline: float | None
) -> None:
    clock, killed = Clock(), []
    monkeypatch.setattr(watchdog, "time", clock)
    waiting = Limits(1.0, deadline, lambda: killed.append("server"))
    steps = []
    for _ in range(25):  # one a second
        waiting.begin_cancel(force=force)
        clock.now += 1
        steps.append(waiting.kill_if_overdue())
    assert killed == ["server"]
    assert Killed.NOTHING_LEFT in steps


def test_a_press_brings_the_end_of_a_deadline_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "time", Clock())
    waiting = Limits(1.0, 1000.0, lambda: None)
    waiting.begin_cancel(force=True)
    assert waiting.timeout() == 2.0


def test_a_deadline_that_is_held_comes_no_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    waiting, ongoing = Limits(1.0, 1000.0, lambda: None), Deadline().start(1000.0, clock.now)
    left = waiting.timeout()
    for _ in range(2):
        waiting.hold(True)
        ongoing.hold(clock.now, held=True)
        assert (waiting.timeout(), ongoing.due) == (None, NEVER)
        clock.now += 5000.0
        waiting.hold(False)
        ongoing.hold(clock.now, held=False)
        assert waiting.timeout() == pytest.approx(left)
        assert ongoing.due == clock.now + 1000.0


def test_a_press_counts_while_a_deadline_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "time", Clock())
    waiting = Limits(1.0, 1000.0, lambda: None)
    waiting.hold(True)
    waiting.begin_cancel(force=True)
    assert waiting.timeout() == 2.0
    waiting.hold(False)
    assert waiting.timeout() == 2.0


class Told(Limits):
    """Of a call whose deadline its caller keeps."""

    def __init__(self, begun: float = 100.0) -> None:
        self.told: list[float] = []
        super().__init__(1.0, 10.0, lambda: None, tell_late=lambda: self.told.append(clock.now), begun=begun)


clock = Clock()


@pytest.fixture
def passing_time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(watchdog, "time", clock)
    clock.now = 100.0
    return clock


def test_an_agent_is_told_of_a_deadline_once_and_then_has_its_time(passing_time: Clock) -> None:
    waiting = Told(begun=98.0)
    assert waiting.timeout() == 8.0
    passing_time.now = 108.0
    assert waiting.kill_if_overdue() is Killed.NONE
    assert waiting.told == [108.0]
    left = waiting.timeout()
    assert left is not None
    assert left > waiting.grace_period
    passing_time.now += left
    assert waiting.kill_if_overdue() is Killed.SERVER  # whose agent is not known
    assert waiting.told == [108.0]


def test_a_launch_that_is_ended_before_needs_no_deadline(passing_time: Clock) -> None:
    """Else the agent would be killed for it before it had its time."""
    for ask in (lambda waiting: waiting.begin_cancel(force=False), Limits.agent_ended):
        waiting = Told(begun=90.1)
        ask(waiting)
        passing_time.now += 0.5
        assert waiting.kill_if_overdue() is Killed.NONE
        assert not waiting.told


def test_a_deadline_that_the_caller_keeps_is_held_too(passing_time: Clock) -> None:
    waiting = Told()
    waiting.hold(True)
    passing_time.now += 1000.0
    assert (waiting.timeout(), waiting.kill_if_overdue(), waiting.told) == (None, Killed.NONE, [])
    waiting.hold(False)
    assert waiting.timeout() == 10.0


def test_no_clock_of_a_launch_counts_while_somebody_debugs_it() -> None:
    """Neither its deadline ends it meanwhile, nor is it said to have stalled."""
    spec: Any = SimpleNamespace(
        grace_period=1.0,
        seconds=100.0,
        stays=False,
        call=SimpleNamespace(name="f()", deadline=None),
        world_size=1,
        sections={},
    )
    agent, theirs = Channel.pair()
    server: Any = SimpleNamespace(kill=lambda: pytest.fail("it was ended"))
    handle = LaunchHandle(spec, server, agent, Relay(plan(1, Policy()), 1, 0), History())
    with contextlib.closing(theirs), contextlib.closing(handle):
        assert handle.timeout() is not None
        for held in (True, False):
            theirs.send(PartSays("debug", Visited(held, 7)))
            linux.wait_readable([handle.fileno()], 60.0)
            assert handle.step()
            assert (handle.timeout() is None) == held


def test_a_call_with_a_debugger_has_no_clock_that_counts_at_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deadline is held there; the others are not begun."""
    monkeypatch.setattr(asking, "check_place", bool)
    given = Options(debug=True, stall=5.0, timeout=60.0, deadline=90.0)
    options = adapted(given)
    assert (options.stall, options.timeout, options.deadline) == (None, None, 90.0)
