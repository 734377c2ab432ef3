"""Suites in the style of public ones, ported to ranks by their decorator lines only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.contract.test_rank_tests import run
from tests.integration.libraries import needs
from tests.integration.strangers import FORMS, SUITE

_COUNT = 35


@pytest.mark.nightly
@pytest.mark.integration
@pytest.mark.parametrize("form", ["ported", pytest.param("torch's", marks=pytest.mark.slow)])
def test_a_suite_of_torchs_classes_and_spawned_functions(tmp_path: Path, form: str) -> None:
    """Both ways the same: of as many tests one is skipped, for want of GPUs. In torch's way they take three minutes."""
    needs("expecttest")
    if form != "ported" and not os.environ.get("MLAUNCH_SOAK"):
        pytest.skip("three minutes in torch's own way; MLAUNCH_SOAK=1 runs it")
    reports, printed = run(tmp_path, {"test_it.py": SUITE.format(**FORMS[form])}, "--durations=5")
    told = {report["name"]: report["outcome"] for report in reports.values()}
    assert [name for name, outcome in told.items() if outcome == "skipped"] == ["WorldTest::test_accelerators"], printed
    assert sum(outcome == "passed" for outcome in told.values()) == _COUNT - 1, printed
