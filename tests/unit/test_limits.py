"""What a caller does by itself where nobody answers."""

from __future__ import annotations

import pytest

from mlaunch.agent.supervision.launch_state import OngoingCall
from mlaunch.caller.launch import watchdog
from mlaunch.caller.launch.watchdog import Killed, Limits
from mlaunch.protocol.messages.debug_messages import HoldDeadline


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
    waiting, call = Limits(1.0, 1000.0, lambda: None), OngoingCall(0, 1000.0, clock.now + 1000.0)
    left = waiting.timeout()
    for _ in range(2):
        waiting.hold(True)
        assert call.obey(HoldDeadline(True), clock.now)
        assert (waiting.timeout(), call.due) == (None, None)
        clock.now += 5000.0
        waiting.hold(False)
        assert call.obey(HoldDeadline(False), clock.now)
        assert waiting.timeout() == pytest.approx(left)
        assert call.due == clock.now + 1000.0
    assert not call.obey(None, clock.now)


def test_a_press_counts_while_a_deadline_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "time", Clock())
    waiting = Limits(1.0, 1000.0, lambda: None)
    waiting.hold(True)
    waiting.begin_cancel(force=True)
    assert waiting.timeout() == 2.0
    waiting.hold(False)
    assert waiting.timeout() == 2.0
