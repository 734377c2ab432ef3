"""Parts of the pytest plugin that need no ranks."""

from __future__ import annotations

import inspect
import os

import pytest

from mlaunch.caller.server.warm import warm_server
from mlaunch.pytest import early, rank_fixtures, station
from mlaunch.pytest.crossing import Findings, Verdict
from mlaunch.pytest.judgement import judge
from tests.conftest import TORCH


def test_a_failure_wins_over_a_skip_and_the_earliest_is_the_cause() -> None:
    verdicts = {
        0: Verdict("skipped", 1.0, "no"),
        1: Verdict("failed", 3.0, "b", "two"),
        2: Verdict("failed", 2.0, "a", "one"),
    }
    judged = judge(Findings(3, verdicts))
    assert judged.longrepr == "one"
    assert ("rank 1", "two") in judged.sections


def test_ranks_skip_together_or_not_at_all() -> None:
    skipped = Verdict("skipped", reason="no", crash=("test.py", 3))
    judged = judge(Findings(2, {0: skipped, 1: skipped}))
    assert isinstance(judged.error, pytest.skip.Exception)
    assert judged.crash == ("test.py", 3)
    judged = judge(Findings(2, {0: skipped, 1: Verdict("passed")}))
    assert "rank 0 skipped; rank 1 passed (no)" in str(judged.error)
    assert judge(Findings(2, dict.fromkeys(range(2), Verdict("passed")))).error is None


def test_verdicts_come_through_the_log_once() -> None:
    board, log = station.new_files(2)
    for rank in (1, 0):
        station.write(log, rank, Verdict("failed", reason=str(rank)))
    assert {rank: verdict.reason for rank, verdict in station.take(log).items()} == {0: "0", 1: "1"}
    assert station.take(log) == {}
    os.close(board)
    os.close(log)


@pytest.mark.skipif(not TORCH, reason="a fork server imports torch")
def test_a_fork_server_that_is_there_stays() -> None:
    server, preload = warm_server.get(os.environ), warm_server.preload
    early.start()
    assert warm_server.get(os.environ) is server
    assert warm_server.preload == preload


def test_a_rank_fixture_asks_for_what_its_function_asks_for() -> None:
    def mesh(tmp_path: object, size: int = 2) -> None: ...

    stand_in = rank_fixtures._stand_in(mesh, None)
    assert list(inspect.signature(stand_in).parameters) == ["request", "tmp_path", "size"]
    assert (stand_in.__name__, stand_in.__module__) == ("mesh", __name__)
