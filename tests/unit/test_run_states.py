"""A submitted run between its turn and its start."""

from __future__ import annotations

from mlaunch.sweeps.caller.run_future import Run, RunStatus


def test_a_run_whose_turn_has_come_is_starting() -> None:
    status = RunStatus()
    run = Run("train()", {}, status)
    assert run.state == "waiting"
    status.starting = True
    assert run.state == "starting"
    assert repr(run) == "<Run of train(): starting>"
    assert not run.running()
