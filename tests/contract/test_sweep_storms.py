"""Many trials: what a run that is over keeps, and storms of which ``python -m tests.sweep_storm`` makes larger ones."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch.distributed as dist

import mlaunch
from mlaunch import LaunchError, launcher
from tests import launches
from tests.sweep_storm import failures, killed, pruned

_OF_A_LAUNCH = launches.parts_of_a_launch()
_LINES = 2000


def reached_from(things: Iterable[object]) -> list[object]:
    """The objects that these hold, and those that they hold; not what belongs to modules and classes."""
    waiting, seen = list(things), {}
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and not isinstance(one, type | types.ModuleType | types.FunctionType):
            seen[id(one)] = one
            waiting += gc.get_referents(one)
    return list(seen.values())


def report_and_fail(number: int) -> int:
    mlaunch.report(number, loss=0.5)
    print("a line of some length\n" * _LINES, end="")
    if number == 1:
        raise ValueError("no such luck")
    if number == 2 and dist.get_rank() == 1:
        raise SystemExit(3)
    return number


class Callback:
    def __call__(self, *_: object) -> None: ...


@pytest.mark.slow
def test_a_run_that_is_over_keeps_what_it_promises_and_nothing_of_its_launch() -> None:
    train = launcher(report_and_fail, n_gpus=2, concurrent=2, output="none")
    runs = train.map([0, 1, 2], return_exceptions=True)
    for run in runs:
        run.on_report(Callback())
        run.add_done_callback(Callback())
    values, raised, ended = runs.results(120)
    kinds = {type(one) for one in reached_from([*runs])}
    assert not kinds & {*_OF_A_LAUNCH, Callback, types.FrameType}
    assert values == [0, 0]
    assert (type(raised), type(ended), type(raised.__cause__)) == (ValueError, LaunchError, LaunchError)
    assert raised.__cause__.failures[0].traceback
    for number, run in enumerate(runs):
        assert run.arguments == {"number": number}
        assert {reported["loss"] for reported in run.reports} == {0.5}
        assert run.report is not None
        printed = max(run.report.output(rank) for rank in range(2))  # one that fails may end the other before its print
        assert 0 < len(printed) <= 4096
        assert set(printed.splitlines()) == {"a line of some length"}
        assert not run.cancel()


@pytest.mark.slow
def test_a_third_of_the_trials_fail() -> None:
    found = failures(12, seed=2)
    assert (found.wrong, found.left) == ([], [])
    assert found.failed > 0
    assert found.right + found.failed + found.survived == 12


@pytest.mark.nightly
@pytest.mark.slow
def test_trials_with_ddp_are_pruned_at_one_step() -> None:
    found = pruned(3)
    assert (found.at_one_step, found.never) == (3, 0)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_script_is_killed_in_a_sweep(tmp_path: Path) -> None:
    found = killed(tmp_path, 12)
    assert found.right
    assert found.known_and_repeated == 0
