"""The pytest plugin: what pytest documents of fixtures, marks, capturing and logging is the same on ranks, or is known.

Two runs of ``alike_suite``, of which one gives each test the mark ``ranks(1)``. What differs is in the table of
docs/testing.rst under "What differs from plain pytest".
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.contract import alike_suite
from tests.contract.test_rank_tests import run

pytestmark = pytest.mark.slow

Reports = dict[tuple[str, str], list[dict[str, Any]]]  # by test and phase
# The outcome of the test's call: without ranks, and on them.
OTHER_OUTCOMES = {
    "test_around.py::test_setup_module": ("passed", "failed", "name 'of_setup' is not defined"),
    "test_around.py::test_async": ("failed", "passed", ""),
    "test_fixtures.py::test_getfixturevalue_in_a_test": ("passed", "failed", "no fixture can be set up on a rank"),
    "test_fixtures.py::test_session_of_request": ("passed", "failed", "request.session does not exist on a rank"),
    "test_fixtures.py::test_testsuite_property": ("passed", "failed", "works only in pytest's process"),
    "test_fixtures.py::test_cache": ("passed", "failed", "works only in pytest's process"),
    "test_fixtures.py::test_tmp_path_factory_itself": ("passed", "failed", "works only in pytest's process"),
    "test_logging.py::test_phases": ("passed", "failed", r"assert \[\] == \['in setup'\]"),
}
OTHER_TEXTS = {
    "test_around.py::TestCase::test_expected",  # where unittest reports it
    "test_around.py::test_subtests",  # what is printed in a part is printed in the test
    "test_capture.py::test_tee",
    "test_fixtures.py::test_adds_a_finalizer",  # which is called as the test ends
    "test_fixtures.py::test_factory",  # whose list is changed there, and printed here
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reports, Reports]:
    """Return the reports of both runs."""
    found = []
    for name, variables in (("without", {}), ("ranks", {"ON_RANKS": "1"})):
        directory = tmp_path_factory.mktemp(name)
        flags = ("-rA", "--basetemp", str(directory / "base"), "-o", "log_level=INFO")
        _, printed = run(directory, alike_suite.FILES, *flags, **variables)
        reports: Reports = defaultdict(list)
        for line in (directory / "phases").read_text().splitlines():
            report = json.loads(_without_places(line, directory))
            reports[report.pop("name"), report.pop("when")].append(report)
        assert len({test for test, _ in reports}) > 210, printed
        found.append(reports)
    return found[0], found[1]


def _without_places(text: str, directory: Path) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text.replace(f"{directory}/", ""))


@pytest.mark.nightly
def test_outcomes_are_those_without_ranks(both: tuple[Reports, Reports]) -> None:
    plain, ranks = both
    assert plain.keys() == ranks.keys()
    for test, phase in plain:
        told = [[report["outcome"] for report in reports[test, phase]] for reports in both]
        if phase == "call" and test in OTHER_OUTCOMES:
            before, now, text = OTHER_OUTCOMES[test]
            assert told == [[before], [now]], test
            assert re.search(text, ranks[test, phase][0]["text"]), test
        else:
            assert told[0] == told[1], (test, ranks[test, phase])


@pytest.mark.nightly
def test_reports_are_those_without_ranks(both: tuple[Reports, Reports]) -> None:
    """Text, reason, properties and sections; but what a rank prints has its number in front."""
    plain, ranks = both
    for test, phase in plain:
        if test not in OTHER_OUTCOMES and test not in OTHER_TEXTS:
            assert list(map(_plain, ranks[test, phase])) == list(map(_plain, plain[test, phase])), (test, phase)


def _plain(report: dict[str, Any]) -> dict[str, Any]:
    """Leave out the tests that the ranks had run before, ranks' numbers, the last end of a line, and our properties."""
    sections = [(title, text.rstrip("\n")) for title, text in report["sections"] if title != "Captured ranks call"]
    properties = [one for one in report["properties"] if not one[0].startswith("mlaunch.")]
    without_numbers = [(title, re.sub(r"(?m)^\[0\] ", "", text)) for title, text in sections]
    return {**report, "sections": without_numbers, "properties": properties}


def test_the_page_has_each_difference() -> None:
    """By a word of it."""
    page = (Path(__file__).parents[2] / "docs" / "testing.rst").read_text()
    table = page.partition("What differs from plain pytest\n")[2].partition("What it costs\n")[0]
    words = ["setup_module", "async def", "getfixturevalue", "request.session", "record_testsuite_property", "cache"]
    words += [
        "tmp_path_factory",
        "get_records",
        "expectedFailure",
        "subtests",
        "capteesys",
        "addfinalizer",
        "[0]",
        "--junitxml",
    ]
    assert not [word for word in words if word not in table]
