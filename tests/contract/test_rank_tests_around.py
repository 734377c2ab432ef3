"""The pytest plugin: what is around a test on ranks is as around any other test. One run shows most of it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.contract import around_suite
from tests.contract.test_rank_tests import outcomes, run

_PLUGINS = [name for name in ("pytest_mock", "_hypothesis_pytestplugin") if importlib.util.find_spec(name)]
_HAS_SUBTESTS = importlib.util.find_spec("_pytest.subtests") is not None


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mapping[str, Any], str]:
    """Return the reports of ``around_suite`` by the tests' names, and what pytest printed."""
    flags = [flag for name in ["marking", *_PLUGINS] for flag in ("-p", name)]
    flags += ["--mine=7", "--log-level=INFO", "-o", "log_format=<%(message)s>", "-o", "set_by_file=there", "-rA"]
    reports, printed = run(tmp_path_factory.mktemp("around"), around_suite.FILES, *flags)
    return {report["name"].rpartition("::")[2]: report for report in reports.values()}, printed


@pytest.mark.nightly
def test_what_passes_without_ranks_passes(found: tuple[Mapping[str, Any], str]) -> None:
    """Marks of hooks, classes by other names, class attributes, fixtures on ranks, request, options, changed values."""
    reports, printed = found
    told = outcomes(reports)
    failed = {name for name, outcome in told.items() if outcome == "failed"}
    expected = set(around_suite.FAIL) - (set() if "pytest_mock" in _PLUGINS else {"test_class_mocker"})
    assert failed == expected, printed
    missing = set() if "pytest_mock" in _PLUGINS else {"test_mocker", "test_class_mocker"}
    missing |= set() if len(_PLUGINS) > 1 else around_suite.WITH_EXAMPLES
    missing |= set() if _HAS_SUBTESTS else {"test_subtests"}
    assert {name for name, outcome in told.items() if outcome == "skipped"} == around_suite.SKIP | missing, printed
    assert sum(outcome == "passed" for outcome in told.values()) >= 25


@pytest.mark.dear("it runs the suite whose reports this file reads")
def test_what_cannot_be_is_named_with_what_to_do(found: tuple[Mapping[str, Any], str]) -> None:
    reports, _ = found
    for name, text in around_suite.FAIL.items():
        if name in reports:
            told = reports[name]["text"] + str(reports[name]["sections"])
            assert re.search(text, told), (name, told)
            assert "mlaunch/pytest" not in told, told


def test_skips_are_where_the_test_is(found: tuple[Mapping[str, Any], str]) -> None:
    """Each in a line of its own, not folded into one at a file of ours."""
    _, printed = found
    lines = around_suite.FILES["test_it.py"].splitlines()
    for test in ("test_skip_of_unittest", "test_many_devices", "test_skip_raised"):
        line = next(number for number, text in enumerate(lines, 1) if f"def {test}(" in text)
        line -= lines[line - 2].startswith("@")  # pytest's line of a function is that of its decorators
        assert re.search(rf"SKIPPED \[1\] test_it.py:{line}: ", printed), printed


def test_what_is_told_beside_the_outcome(found: tuple[Mapping[str, Any], str]) -> None:
    """Warnings as they were, processes that are left, logs by format and level, text that is not captured."""
    reports, printed = found
    assert "Slow: x took 3 s" in printed
    assert "the test left 2 processes on each of ranks 0-1" in printed
    assert ["Captured log call", "<informed>"] in reports["test_logs"]["sections"]
    before, _, _ = printed.partition("= short test summary")
    assert "[0] not captured\n[1] not captured\n" in before
    assert "[0] captured" not in before
    if _HAS_SUBTESTS:
        assert "SUBFAILED[odd] (i=1) test_it.py::test_subtests - assert (1 % 2) == 0" in printed
        assert "contains 1 failed subtest" in printed
        assert "ERROR at setup of test_setup_fails" in printed
        assert "ERROR at teardown of test_two_yields" in printed


def test_examples_are_the_same_on_all_ranks(found: tuple[Mapping[str, Any], str]) -> None:
    """A failure of all ranks is shrunk; of one that fails on one rank the example is told; the seed is told."""
    if len(_PLUGINS) < 2:
        pytest.skip("needs hypothesis")
    reports, _ = found
    told = {name: reports[name]["text"] + str(reports[name]["sections"]) for name in around_suite.WITH_EXAMPLES}
    assert "x=10," in told["test_examples_fail"] or "x=10\n" in told["test_examples_fail"]
    assert re.search(
        r"Falsifying example: test_example_fails_here\(x=\d+\), not shrunk", told["test_example_fails_here"]
    )
    assert re.search(r"--hypothesis-seed=\d+ draws these examples again", told["test_examples_fail"])


def test_several_sizes_come_too_late(tmp_path: Path) -> None:
    text = """
import pytest
@pytest.mark.parametrize("a", [pytest.param(1, marks=pytest.mark.ranks(1, 2))])
def test_a(a): pass
"""
    _, printed = run(tmp_path, {"test_it.py": text}, "--collect-only")
    told = "test_it.py::test_a[1]: the mark ranks(1, 2) comes from pytest.param or a hook, too late"
    assert told in printed
