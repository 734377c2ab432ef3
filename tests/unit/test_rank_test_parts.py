"""Parts of the pytest plugin that need no ranks."""

from __future__ import annotations

import inspect
import io
import logging
import os
import signal
import sys
import types
import unittest
from typing import Any

import pytest

from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.warm_server import warm_server
from mlaunch.leases import caller
from mlaunch.leases.caller.acquisition import Wish
from mlaunch.pytest import wire
from mlaunch.pytest.caller import new_ranks, rank_fixtures, runner
from mlaunch.pytest.caller.judgement import is_out_of_step, judge
from mlaunch.pytest.caller.mark import Shape
from mlaunch.pytest.caller.runner import Debugging
from mlaunch.pytest.rank import fixtures_of_rank, isolation, run_test, unittest_cases
from mlaunch.pytest.wire import Beginning, Definition, Findings, RankTest, Surroundings, Verdict
from tests.conftest import TORCH

NO_PLACE: Any = None  # where it is not asked


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
    board, log = wire.new_barrier_files(2)
    for rank in (1, 0):
        wire.write_verdict(log, rank, Verdict("failed", reason=str(rank)))
    assert {rank: verdict.reason for rank, verdict in wire.take_verdicts(log).items()} == {0: "0", 1: "1"}
    assert wire.take_verdicts(log) == {}
    os.close(board)
    os.close(log)


def test_a_rank_that_has_gone_on_has_failed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has looked sooner than the other one, who then finds it in the next part."""
    board, log = wire.new_barrier_files(2)
    files = [f"/proc/self/fd/{fd}" for fd in (board, log)]
    beginning = Beginning("", "", None, {}, {}, {}, (), *files, 2, None, colored=False)
    ranks = []
    for rank in (0, 1):
        monkeypatch.setattr(wire.this_rank, "this_rank", types.SimpleNamespace(rank=rank))
        ranks.append(wire.RankBarrier(beginning))
    for one in ranks:
        one.leave_part(1, 1)
        one.leave_part(1, 2, 7)
    assert ranks[0].all_failed(1, 2, 7)
    ranks[0].leave_part(1, 3)
    ranks[0].leave_part(1, 4, 8)
    assert ranks[1].all_failed(1, 2, 7)
    assert not ranks[1].all_failed(1, 3, 7)  # there it has passed
    assert not ranks[1].all_failed(1, 2, 8)  # another failure
    for one in ranks:
        os.close(one._log)
    os.close(board)
    os.close(log)


@pytest.mark.skipif(not TORCH, reason="a fork server imports torch")
def test_a_fork_server_that_is_there_stays() -> None:
    server, preload = warm_server.get(os.environ), warm_server.preload
    new_ranks.start_server()
    assert warm_server.get(os.environ) is server
    assert warm_server.preload == preload


def test_a_rank_fixture_asks_for_what_its_function_asks_for() -> None:
    def mesh(tmp_path: object, size: int = 2) -> None: ...

    stand_in = rank_fixtures._stand_in(mesh, ("file", "mesh", 0), None)
    assert list(inspect.signature(stand_in).parameters) == ["request", "tmp_path", "size"]
    assert (stand_in.__name__, stand_in.__module__) == ("mesh", __name__)


def test_ranks_that_have_not_entered_the_same_are_out_of_step() -> None:
    """Groups that were begun do not count: each test names its own. Messages of a test that passed have arrived."""
    both = (0, 1)

    def stands(number: int, messages: int | None = 0, outcome: str = "passed") -> Verdict:
        return Verdict(
            outcome, entered={"0 cpu": (both, number), "groups": (both, number), "messages": (both, messages)}
        )

    assert not is_out_of_step(Findings(2, {0: stands(1), 1: stands(1)}))
    assert is_out_of_step(Findings(2, {0: stands(1), 1: stands(2)}))
    assert not is_out_of_step(Findings(2, {0: stands(1, None), 1: stands(2, None)}))  # one sends, one receives
    assert is_out_of_step(Findings(2, {0: stands(1, None, "failed"), 1: stands(1, None)}))
    assert is_out_of_step(Findings(2, {0: stands(1), 1: Verdict("passed")}))
    assert not is_out_of_step(Findings(2, {0: stands(1), 1: stands(2)}, told="the launcher has looked"))


def test_the_limit_of_pytest_timeout(request: pytest.FixtureRequest) -> None:
    """This suite has one; while ranks run its timer is off, and on again afterwards."""
    assert runner._timeout_of(request.node) == getattr(request.config, "_env_timeout", None)
    with runner._timeouts_suspended(request.node):
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 0


def test_nothing_is_recorded_where_pytest_records_nothing(monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    class Coverage:
        current = staticmethod(lambda: None)

    monkeypatch.setitem(sys.modules, "coverage", types.SimpleNamespace(Coverage=Coverage))
    assert new_ranks.coverage_plan(request.config) is None
    run_test.enter_context("a test")
    run_test.save_coverage()


def test_a_method_raises_what_was_wrong_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Example(unittest.TestCase):
        def tearDown(self) -> None:
            raise OSError("later")

        def runTest(self) -> None:
            with self.subTest(part=5):
                raise KeyError("first")

    monkeypatch.setattr(unittest_cases, "REPORTS_PARTS", False)  # an older pytest
    with pytest.raises(KeyError, match="first") as caught:
        unittest_cases.run_case(unittest_cases.new_case(Example, "runTest"), [], NO_PLACE)
    assert caught.value.__dict__["__notes__"] == ["in the subtest (part=5)"]


def test_workers_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them says when there are too few."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "4")
    monkeypatch.setattr(new_ranks.device, "usable_cpus", lambda: 16)
    assert new_ranks.share_of_cores(2) == {"OMP_NUM_THREADS": "2"}
    new_ranks.warn_of_cores(Shape(4, "cpu", None))
    with pytest.warns(pytest.PytestWarning, match="4 workers with 8 ranks each share 16 cores.*; -n 2 is likely"):
        new_ranks.warn_of_cores(Shape(8, "cpu", None))
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    new_ranks.warn_of_cores(Shape(8, "cpu", None))


def test_a_worker_has_devices_alone_and_gives_them_back_when_another_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, wish = Shape(1, "toy", None), Wish(["toy 0"], 1, "pytest's worker gw1")
    request = caller.LeaseRequest(Options(), os.environ, wish, {"toy 0": 0})
    monkeypatch.setattr(caller, "request_of", lambda *_: request)
    monkeypatch.setattr(new_ranks.warm_server, "get", lambda _: None)
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    assert new_ranks.WorkerDevices(shape, 60.0).devices is None  # without xdist
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    assert new_ranks.WorkerDevices(Shape(1, "cpu", None), 60.0).devices is None
    ours = new_ranks.WorkerDevices(shape, 60.0)
    assert (ours.devices, ours.environ) == ([0], {"MLAUNCH_LEASED": "toy 0"})
    waits = r"gw1 waits for 1 of devices 0, after pytest's worker gw1 \(pid \d+\): it did not get them within 0 s"
    with pytest.raises(pytest.fail.Exception, match=waits):
        new_ranks.WorkerDevices(shape, 0.0)
    monkeypatch.setattr(new_ranks, "_TERM", 0.0)
    assert not ours.are_due()  # nobody waits any more
    waiting = request.begin()
    assert ours.are_due()
    ours.close()
    lease = waiting.step()
    waiting.close()
    assert lease is not None
    lease.close()


def test_a_prompt_for_ranks_wants_somebody_to_ask(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pytestconfig.option, "usepdb", True)
    prompt = pytestconfig.pluginmanager.get_plugin("pdbinvoke")
    with capsys.disabled():
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        assert not Debugging(pytestconfig).wanted
    assert pytestconfig.pluginmanager.get_plugin("pdbinvoke") is prompt


# What surrounds a test on a rank


def test_the_children_of_a_rank() -> None:
    """Those that have ended and that nobody has reaped are among them, and are not reaped."""
    before = isolation._children()
    end, held = os.pipe()
    waits, ended = os.fork(), 0
    if waits == 0:
        os.close(held)
        os.read(end, 1)
        os._exit(0)
    ended = os.fork()
    if ended == 0:
        os._exit(3)
    os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)
    assert isolation._children() - before == {waits, ended}
    assert os.waitstatus_to_exitcode(os.waitpid(ended, 0)[1]) == 3
    os.close(held)
    os.close(end)
    os.waitpid(waits, 0)
    assert isolation._children() == before


def test_the_variables_that_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("GONE", "1")
    monkeypatch.setenv("OTHER", "1")
    since = dict(os.environb)
    assert isolation.changed_variables(since) == {}
    monkeypatch.delenv("GONE")
    monkeypatch.setenv("OTHER", "\udcff")  # any bytes
    monkeypatch.setenv("NEW", "")
    assert isolation.changed_variables(since) == {b"GONE": None, b"OTHER": b"\xff", b"NEW": b""}
    isolation._put_back(since)
    assert dict(os.environb) == since


def test_loggers_apart_from_the_root_are_heard(pytestconfig: pytest.Config) -> None:
    """As in pytest's own process; and nothing of that stays, whatever the test has made of their handlers."""
    surroundings = Surroundings({}, None, None)
    test = RankTest(1, "x", "x", Definition("x", "x", "x", ()), surroundings, twins=("caplog",))
    apart, replaced = logging.getLogger("mlaunch-apart"), logging.getLogger("mlaunch-replaced")
    apart.propagate = replaced.propagate = False
    before = list(logging.root.handlers)
    try:
        with fixtures_of_rank.PerRankFixtures(test, pytestconfig, NO_PLACE) as made:
            caplog = made.make()["caplog"]
            logging.getLogger("below").warning("one")
            apart.warning("two")
            replaced.handlers = []
            assert caplog.messages == (["one", "two"] if fixtures_of_rank._HAS_ALL_LOGGERS else ["one"])
            assert "WARNING  below:test_rank_test_parts.py:" in made.logged
        assert not [one for one in (*apart.handlers, *replaced.handlers) if one is caplog.handler]
        assert logging.root.handlers == before
    finally:
        apart.propagate = replaced.propagate = True
