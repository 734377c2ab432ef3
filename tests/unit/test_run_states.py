"""A submitted run between its turn and its start."""

from __future__ import annotations

from mlaunch.sweeps.caller.launch_loop import loop
from mlaunch.sweeps.caller.run_future import Run, RunCourse


def test_a_run_whose_turn_has_come_is_starting() -> None:
    course = RunCourse(loop)
    run = Run("train()", {}, course)
    assert run.state == "waiting"
    course.starting = True
    assert run.state == "starting"
    assert repr(run) == "<Run of train(): starting>"
    assert not run.running()
