"""``mlaunch.report``: values out of a launch that goes on."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import mlaunch
from mlaunch import launcher
from tests.contract.test_submit import hold, holding
from tests.launches import REPORTS_KEPT
from tests.processes import wait_until


def describe(folder: Path) -> None:
    mlaunch.report(7, loss=torch.tensor(0.5), rank=dist.get_rank(), note="half", none=None)
    hold(folder)
    for step in range(3 * REPORTS_KEPT):
        mlaunch.report(step)


def test_reports_of_a_launch_that_goes_on(tmp_path: Path) -> None:
    run = launcher(describe, n_gpus=2).submit(tmp_path)
    pids = holding(tmp_path, "begun")
    wait_until(lambda: len(run.reports) == 2)
    first = {reported.rank: reported for reported in run.reports}
    assert {rank: (reported.step, reported.values) for rank, reported in first.items()} == {
        rank: (7, {"loss": 0.5, "rank": rank, "note": "half", "none": None}) for rank in (0, 1)
    }
    assert first[1]["loss"] == 0.5
    for pid in pids:
        (tmp_path / f"begun-{pid}").unlink()
    run.result(120)
    last = range(2 * REPORTS_KEPT, 3 * REPORTS_KEPT)
    for rank in (0, 1):
        steps = [reported.step for reported in run.reports if reported.rank == rank]
        assert steps == [7, *last] or len(steps) > REPORTS_KEPT + 1  # seen in between
    assert run.latest is not None
    assert run.latest.step == 3 * REPORTS_KEPT - 1


def learn(lr: float) -> tuple[int, str]:
    """Diverges at high rates, and is stopped then; otherwise it stops by itself."""
    for step in itertools.count():
        mlaunch.report(step, loss=lr * step)
        if reason := mlaunch.stopping():
            return step, reason
        if lr < 1 and step == 100:
            return step, ""
    raise AssertionError


def test_a_trial_that_is_pruned_stops_at_one_step_on_all_ranks() -> None:
    runs = launcher(learn, n_gpus=2, concurrent=2).map([10, 0.1])
    for run in runs:
        run.on_report(lambda reported, run=run: reported["loss"] > 50 and run.stop("pruned"))  # type: ignore[misc]
    (pruned, other), good = runs.results(120)
    assert pruned == other
    assert pruned[1] == "pruned"
    assert good == [(100, "")] * 2
    row = runs.rows()[1]
    assert (row["step"], row["loss"]) == (100, 10.0)
    assert "step=100, loss=10" in runs.table()


@pytest.mark.slow
def test_a_callback_that_raises_is_logged_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    run = launcher(learn, n_gpus=1).submit(10)
    run.on_report(lambda reported: reported["accuracy"])
    run.on_report(lambda _: sys.exit("no run ends by this"))
    wait_until(lambda: "KeyError: 'accuracy'" in caplog.text)
    wait_until(lambda: "SystemExit: no run ends by this" in caplog.text)
    run.stop()
    assert run.result(120)[0][1] == "asked"


def test_values_that_cannot_be_reported_are_refused() -> None:
    mlaunch.report(1, loss=0.5)  # here it does nothing
    with pytest.raises(TypeError, match=r"report\(loss=list\): allowed: a number"):
        mlaunch.report(1, loss=[0.5])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"report\(\) of \d+ bytes; allowed: 500"):
        mlaunch.report(1, text="x" * 500)
