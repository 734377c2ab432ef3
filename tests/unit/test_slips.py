"""The list of slips (``python -m tests.slips``) does not rot: each can still be made, and its tests are there."""

from __future__ import annotations

import ast
import re
from collections import Counter

import pytest

from tests.conftest import ROOT
from tests.slip_list import SLIPS, Slip


@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: slip.name)
def test_a_slip_can_be_made(slip: Slip) -> None:
    """Where its line has moved, it is to move with it; the code must still be read, or no test is needed to notice."""
    text = (ROOT / "mlaunch" / slip.file).read_text(encoding="utf-8")
    assert text.count(slip.before) == 1
    ast.parse(text.replace(slip.before, slip.after))
    for test in slip.tests:
        file, _, name = test.partition("::")
        assert re.search(rf"^(async )?def {name or 'test_'}", (ROOT / "tests" / file).read_text(), re.MULTILINE), test


def test_slips_are_of_all_areas() -> None:
    assert len(SLIPS) >= 60
    assert max(Counter(slip.name for slip in SLIPS).values()) == 1
    assert min(Counter(slip.area for slip in SLIPS).values()) >= 3
    assert not {slip.area for slip in SLIPS} & {slip.name for slip in SLIPS}  # both can be given to the command
