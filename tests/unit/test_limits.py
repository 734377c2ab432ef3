"""What a caller does by itself where nobody answers."""

from __future__ import annotations

import pytest

from mlaunch.caller.launch import watchdog
from mlaunch.caller.launch.watchdog import Killed, Limits


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
