"""What to send in the place of what belongs to one process."""

from __future__ import annotations

import io
import threading

import pytest

from mlaunch.protocol import explain


@pytest.mark.parametrize(
    ("culprit", "passed", "returned"),
    [
        ((x for x in ()), ": pass a list of its items, or create it in the function, which each rank runs",
         ": return a list of its items"),
        (io.BytesIO(), ": pass its path, and open it in the function, which each rank runs",
         ": return its path, or what it holds"),
        (threading.Lock(), ": create it in the function, which each rank runs", ""),
        (object(), "", ""),
    ],
)  # fmt: skip
def test_advice_on_values_that_cannot_travel(culprit: object, passed: str, returned: str) -> None:
    assert (explain.instead_to_pass(culprit), explain.instead_to_return(culprit)) == (passed, returned)
