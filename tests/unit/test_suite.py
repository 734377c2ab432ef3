"""What the suite does by itself: what it leaves for the night, and what it counts."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import _is_for_the_night
from tests.cost import CpuClock
from tests.processes import said_in_fork

SPIN = "import os\nwhile sum(os.times()[:2]) < 0.3: pass"


@pytest.mark.parametrize(
    ("patterns", "parameters", "is_for_it"),
    [((), "a", True), (("a", "b*"), "a", True), (("a", "b*"), "b-2", True), (("a", "b*"), "c", False)],
)
def test_what_is_left_for_the_night(patterns: tuple[str, ...], parameters: str, is_for_it: bool) -> None:
    """All of a test, or the parameters that its mark names; the others lose the mark, so that -m takes none of them."""
    marks = [pytest.mark.nightly(*patterns).mark if patterns else pytest.mark.nightly.mark]
    item: Any = SimpleNamespace(
        own_markers=marks, iter_markers=lambda _: iter(marks), callspec=SimpleNamespace(id=parameters)
    )
    assert _is_for_the_night(item) is is_for_it
    assert bool(marks) is is_for_it


def test_the_time_of_what_a_test_starts_is_its_cost() -> None:
    def spend() -> str:
        clock = CpuClock()
        before = clock.seconds()
        subprocess.run([sys.executable, "-S", "-c", SPIN], check=True)
        spent = clock.seconds() - before
        clock.close()
        return str(spent >= 0.3)

    assert said_in_fork(spend) == "True"


ENDS = """
import atexit, sys
atexit.register(lambda: print("handler"))
sys.stdout.write("text ")
"""


@pytest.mark.parametrize(("end", "status"), [("", 0), ("sys.exit(3)", 3), ("sys.exit('why')", 1), ("1 / 0", 1)])
def test_a_fork_of_the_tests_ends_as_an_interpreter_does(run_script: Any, end: str, status: int) -> None:
    """Though it takes no modules apart: see ``tests/ending.py``."""
    pytest.importorskip("torch", reason="without it no forks are lent")
    done = run_script(ENDS + end)
    assert (done.returncode, done.stdout) == (status, "text handler\n")
    last = {"1 / 0": "ZeroDivisionError: division by zero", "sys.exit('why')": "why"}.get(end, "")
    assert done.stderr.splitlines()[-1:] == ([last] if last else [])
