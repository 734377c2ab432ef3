"""The pytest plugin: suites are run as anybody runs them, and their reports are looked at."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import launches, toy
from tests.conftest import ROOT
from tests.contract import rank_suite
from tests.imported import IMPORTED

Reports = Mapping[str, Mapping[str, Any]]


def run(
    directory: Path, files: Mapping[str, str], *flags: str, python: str = IMPORTED, **variables: str
) -> tuple[Reports, str]:
    """Runs a suite; returns the reports of its tests by name, and what pytest printed."""
    for name, text in {"conftest.py": rank_suite.CONFTEST, **files}.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    (directory / "pytest.ini").write_text("[pytest]\npythonpath = .\nranks_deadline = 60\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}  # no worker
    environ |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", **variables}
    command = [python, "-m", "pytest", "-p", launches.plugin().__name__, "-p", "no:cacheprovider", *flags]
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, timeout=300, check=False)
    lines = (directory / "reports").read_text().splitlines() if (directory / "reports").exists() else []
    return {found["where"] + found["name"]: found for found in map(json.loads, lines)}, done.stdout + done.stderr


@pytest.fixture
def suite(tmp_path: Path) -> Callable[..., tuple[Reports, str]]:
    """Runs one file of ``rank_suite``; gives the reports by the tests' names alone."""

    def of(text: str, *flags: str) -> tuple[Reports, str]:
        found, printed = run(tmp_path, {"test_it.py": text}, *flags)
        return {report["name"].rpartition("::")[2]: report for report in found.values()}, printed

    return of


def outcomes(reports: Reports) -> dict[str, str]:
    return {name: report["outcome"] for name, report in reports.items()}


def test_tests_of_one_shape_share_ranks(suite: Callable[..., tuple[Reports, str]], tmp_path: Path) -> None:
    """With those that the page on testing shows."""
    listing = (ROOT / "docs" / "listings" / "testing.py").read_text()
    (tmp_path / "test_listing.py").write_text(listing)
    reports, printed = suite(rank_suite.SHARING)
    assert outcomes(reports).pop("test_too_few_devices") == "skipped"
    assert "needs 512 cuda devices: " in reports["test_too_few_devices"]["text"]
    assert sum(outcome == "passed" for outcome in outcomes(reports).values()) == 19 == len(reports) - 1, printed
    pids = {name: report["properties"].get("pid") for name, report in reports.items()}
    assert pids["test_first"] == pids["test_second"] == pids["test_group"] != pids["test_fresh"]
    assert [reports[f"test_sizes[ranks={size}-5]"]["properties"]["size"] for size in (1, 2)] == [6, 7]


def test_fresh_ranks_for_each_test_and_selection_by_size(suite: Callable[..., tuple[Reports, str]]) -> None:
    selected = ["-m", "ranks(n=2) or ranks(n=512)", "-k", "first or fresh or sizes or devices"]
    reports, printed = suite(rank_suite.SHARING, "--ranks-fresh", "--ranks-require", *selected)
    assert set(reports) == {"test_first", "test_fresh", "test_sizes[ranks=2-5]", "test_too_few_devices"}, printed
    assert reports["test_too_few_devices"]["outcome"] == "failed"
    assert reports["test_first"]["properties"] != reports["test_fresh"]["properties"]


def test_an_assertion_reads_as_without_ranks(tmp_path: Path) -> None:
    """Byte for byte, in colours, and two files of one name are two modules."""
    marked = rank_suite.ASSERTIONS.format(mark=rank_suite.MARKED)
    files = {"plain/test_it.py": rank_suite.ASSERTIONS.format(mark=""), "ranks/test_it.py": marked}
    reports, printed = run(tmp_path, files, "--import-mode=importlib", "--color=yes")
    names = [name.removeprefix("plain") for name in reports if name.startswith("plain")]
    assert len(names) == 17, printed
    for name in names:
        plain, ranks = reports[f"plain{name}"], reports[f"ranks{name}"]
        assert ranks["outcome"] == plain["outcome"] == "failed", name
        assert _without_places(ranks["text"]) == _without_places(plain["text"].replace("plain/", "ranks/"))


def _without_places(text: str) -> str:
    """Leaves out where objects lie in memory, and which of two directories is the test's."""
    return re.sub(r"0x[0-9a-f]+|test_argument\d", "", text)


def test_all_ranks_are_heard(suite: Callable[..., tuple[Reports, str]]) -> None:
    """One session: each next test shows that what went wrong before it did no harm."""
    reports, printed = suite(rank_suite.OUTCOMES, "-p", "pytest_timeout", "--timeout=300")
    told = {name: (report["outcome"], report["xfail"]) for name, report in reports.items()}
    assert {name for name, (outcome, _) in told.items() if outcome == "passed"} == {
        "test_warns",
        "test_after_hang",
        "test_next",
    }, printed
    assert {name for name, (outcome, xfail) in told.items() if outcome == "skipped" and not xfail} == {
        "test_skip",
        "test_import",
    }
    assert {name for name, (_, xfail) in told.items() if xfail} == {"test_xfail", "test_expected"}
    texts = {name: report["text"] + json.dumps(report["sections"]) for name, report in reports.items()}
    assert texts["test_skip"].startswith("Skipped: not today")
    assert "rank 0 passed; rank 1 skipped (not today)" in texts["test_some_skip"]
    assert "rank 1 skipped" in texts["test_skip_and_wait"]
    assert "barrier" in texts["test_skip_and_wait"]
    assert "ValueError: boom" in texts["test_one"]
    assert "rank 1 failed" in texts["test_one"]
    assert "in barrier at test_it.py" in texts["test_one"]
    assert "ValueError: other" in texts["test_unexpected"]
    assert "assert 0 == 5" in texts["test_different"]
    assert "assert 1 == 5" in texts["test_different"]
    assert "[0] said by 0" in texts["test_different"]
    assert printed.count("UserWarning: careful, both") == 1
    assert "UserWarning: is an error" in texts["test_error"]
    assert "test_hang did not finish within its deadline of 2 s" in texts["test_hang"]
    assert "rank 0 has not entered barrier #1 of the default group (rank 1 waits for it" in texts["test_hang"]
    assert "test_hang_of_timeout did not finish within its deadline of 2 s" in texts["test_hang_of_timeout"]
    assert "stack of rank 1" in texts["test_hang"]
    assert "rank 1 of test_killed was killed by SIGKILL" in texts["test_killed"]
    assert "pytest test_it.py::test_skip test_it.py::test_some_skip" in texts["test_skip_and_wait"]


@pytest.mark.nightly
@pytest.mark.parametrize("orders", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_state_that_a_test_leaves_on_ranks_does_not_reach_the_next(
    suite: Callable[..., tuple[Reports, str]], orders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each leak by a test of its own, in random orders; and what might confuse the ranks of the next test."""
    monkeypatch.setenv("ORDERS", str(orders))
    reports, printed = suite(rank_suite.LEAKS)
    told = outcomes(reports)
    assert told.pop("test_fails_before_a_group_on_one_rank") == "skipped", printed
    assert list(told.values()) == ["passed"] * (25 * orders + 8), printed
    assert printed.count("the test left its ranks out of step") == 1
    assert "the test left a thread 'leaked' on ranks 0-1" in printed
    begun = [report["properties"]["random"] for name, report in reports.items() if name.startswith("test_leak[")]
    assert all(one == begun[0] for one in begun)


def test_ranks_that_have_grown_are_replaced(suite: Callable[..., tuple[Reports, str]]) -> None:
    reports, printed = suite(rank_suite.MEMORY, "-o", "ranks_memory=64")
    assert outcomes(reports) == dict.fromkeys(reports, "passed"), printed
    first, collects, keeps, following = (reports[name]["properties"]["pid"] for name in reports)
    assert first == collects == keeps != following
    assert re.search(r"ranks held 1[0-9][0-9] MiB more than after their first test; new ones replace them", printed)


def test_fixtures_on_ranks(suite: Callable[..., tuple[Reports, str]]) -> None:
    reports, printed = suite(rank_suite.FIXTURES)
    failed = {name for name, outcome in outcomes(reports).items() if outcome != "passed"}
    assert failed == {"test_lock", "test_factory"}, printed
    assert len(reports) == 9
    assert reports["test_twins"]["properties"] == {"answer": 42, "mlaunch.ranks": 2}
    assert "the fixture 'lock' gives a lock, which cannot be sent" in reports["test_lock"]["text"]
    assert "the fixture 'tmp_path_factory' works only in pytest's process" in reports["test_factory"]["text"]


def test_lines_that_run_on_ranks_count(tmp_path: Path) -> None:
    """With pytest-cov as it is: the same lines and branches of five modules as without ranks, and the same contexts."""
    pytest.importorskip("pytest_cov")
    found = []
    for name, mark in (("plain", ""), ("ranks", rank_suite.MARKED)):
        files = {f"covered/{module}.py": text for module, text in rank_suite.COVERED.items()}
        files |= {"covered/__init__.py": "", "test_it.py": rank_suite.COVERING.format(mark=mark)}
        (tmp_path / name).mkdir()
        flags = ("-p", "pytest_cov.plugin", "--cov=covered", "--cov-branch", "--cov-report=json", "--cov-context=test")
        reports, printed = run(tmp_path / name, files, *flags)
        assert outcomes(reports) == dict.fromkeys(reports, "passed"), printed
        told = json.loads((tmp_path / name / "coverage.json").read_text())["files"]
        found.append({file: (one["executed_lines"], one["executed_branches"]) for file, one in told.items()})
    assert len(found[0]) == 6
    assert found[0] == found[1]


@pytest.mark.slow
def test_lines_of_a_test_that_its_deadline_ends_count(tmp_path: Path) -> None:
    pytest.importorskip("pytest_cov")
    files = {"covered/__init__.py": "", "covered/waiting.py": rank_suite.WAITING}
    files["test_it.py"] = rank_suite.ENDED_BY_ITS_DEADLINE
    reports, printed = run(tmp_path, files, "-p", "pytest_cov.plugin", "--cov=covered", "--cov-report=json")
    assert outcomes(reports) == dict.fromkeys(reports, "failed"), printed
    told = json.loads((tmp_path / "coverage.json").read_text())["files"]["covered/waiting.py"]
    assert told["missing_lines"] == [], printed


def test_methods_of_a_test_case(suite: Callable[..., tuple[Reports, str]], tmp_path: Path) -> None:
    reports, printed = suite(rank_suite.CASES)
    told = outcomes(reports)
    passed = {"test_all_reduce", "test_in_class", "test_torn_down", "test_without", "test_coroutine", "test_subtests"}
    assert {name for name, outcome in told.items() if outcome == "passed"} == passed, printed
    assert {name for name, outcome in told.items() if outcome == "skipped"} == {
        "test_skips",
        "test_never",
        "test_expected",
    }
    assert "Lists differ: [1, 2] != [1, 3]" in reports["test_fails"]["text"]
    assert "test_it.py:" in reports["test_fails"]["text"].splitlines()[-1]
    # as without ranks: the test has passed, and one of its parts has not
    assert re.search(r"test_subtests \(i=1\) ___+\n(.*\n)+E +assert 1 != 1", printed)
    assert "SUBFAILED(i=1) test_it.py::TestCases::test_subtests - assert 1 != 1" in printed
    assert reports["test_unexpected"]["text"] == "Unexpected success"
    assert {path.name for path in tmp_path.glob("torn-*")} == {"torn-0", "torn-1"}


@pytest.mark.nightly
def test_a_class_of_torchs_gets_the_mark_and_nothing_else(suite: Callable[..., tuple[Reports, str]]) -> None:
    pytest.importorskip("expecttest")
    reports, printed = suite(rank_suite.TORCH_CASES)
    told = outcomes(reports)
    failed = {
        "test_fails_here": "ValueError: boom",
        "test_tensors": "Mismatched elements: 2 / 2",
        "test_fails_in_the_group": "AssertionError: really",
        "test_2_fails": "bang",
        "test_threads": "test_threads: a MultiThreadedTestCase has threads in place of ranks; leave out the mark ranks",
    }
    assert {name for name, outcome in told.items() if outcome == "failed"} == set(failed), printed
    for name, text in failed.items():
        assert text in reports[name]["text"]
    assert "in barrier at test_it.py" in str(reports["test_fails_here"]["sections"])
    assert told.pop("test_gpus") == "skipped"
    assert sum(outcome == "passed" for outcome in told.values()) == 8


@pytest.mark.nightly("auto")
@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_tests_of_pytest_asyncio(suite: Callable[..., tuple[Reports, str]], mode: str) -> None:
    pytest.importorskip("pytest_asyncio")
    reports, printed = suite(rank_suite.ASYNC, "-p", "pytest_asyncio.plugin", f"--asyncio-mode={mode}")
    passed = {"test_coroutine", "test_method[2]"}
    assert outcomes(reports) == {name: "passed" for name in passed} | {"test_fails_awaiting": "failed"}, printed
    assert "assert 2 == 3" in reports["test_fails_awaiting"]["text"]


@pytest.mark.nightly
@pytest.mark.skipif(not toy.is_possible(), reason="this torch takes no accelerator written in Python")
def test_workers_of_xdist_lease_devices(tmp_path: Path) -> None:
    """Two of them, two devices: no two sets of ranks have the same at a time. Nobody waits for what is not there."""
    pytest.importorskip("xdist")
    (tmp_path / "toy").mkdir()
    toy.install(tmp_path / "toy")
    path = os.pathsep.join([str(ROOT), str(tmp_path / "toy")])
    flags = ("-p", "xdist.plugin", "-n", "2")
    files = {"test_it.py": rank_suite.LEASES}
    reports, printed = run(
        tmp_path, files, *flags, python=sys.executable, PYTHONPATH=path, TOY_LOG=str(tmp_path / "log")
    )
    told = {report["name"]: report for report in reports.values()}
    assert told.pop("test_too_few_devices")["outcome"] == "skipped"
    assert {report["outcome"] for report in told.values()} == {"passed"}, printed
    assert len(told) == 7
    held = [report["properties"].get("devices") for report in told.values()]
    assert {len(devices) for devices in held if devices} == {1, 2}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(not toy.is_possible(), reason="this torch takes no accelerator written in Python")
def test_a_worker_of_xdist_gives_devices_back_between_tests(tmp_path: Path) -> None:
    """Another worker waits for all of them: it has them before the tests of the first one are over."""
    pytest.importorskip("xdist")
    (tmp_path / "toy").mkdir()
    toy.install(tmp_path / "toy")
    path = os.pathsep.join([str(ROOT), str(tmp_path / "toy")])
    flags = ("-p", "xdist.plugin", "-n", "2", "--dist", "loadscope")
    files = {"test_it.py": rank_suite.GIVEN_BACK}
    reports, printed = run(
        tmp_path, files, *flags, python=sys.executable, PYTHONPATH=path, TOY_LOG=str(tmp_path / "log")
    )
    assert list(outcomes(reports).values()) == ["passed"] * 5, printed
