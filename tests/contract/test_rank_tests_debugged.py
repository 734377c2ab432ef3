"""``pytest --pdb`` and ``--trace`` with tests on ranks, at a real terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import launches
from tests.terminal import Terminal

TESTS = """
import pytest, torch.distributed as dist
import mlaunch.pytest

@pytest.fixture
def ten():
    return 10

@mlaunch.pytest.rank_fixture
def made():
    return dist.get_rank() + 1

@pytest.mark.ranks(2)
def test_fails(ten):
    scale = ten * (dist.get_rank() + 1)
    if dist.get_rank() == 1:
        assert scale == 21
    dist.barrier()

@pytest.mark.ranks(2)
def test_breaks():
    number = dist.get_rank()
    if number == 0:
        breakpoint()
    number += 1
    dist.barrier()
    print("number", number)

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
def test_skips_and_fails():
    if dist.get_rank() == 0:
        1 / 0

@pytest.mark.ranks(2)
def test_has_a_fixture_of_the_ranks(made):
    assert made == dist.get_rank() + 1

def test_without_ranks():
    mine = 3
    assert mine == 4
"""
RUN = """
import os, sys
import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:], "test_it.py"]))
"""
Start = Callable[..., Terminal]


@pytest.fixture
def run_pytest(tmp_path: Path) -> Iterator[Start]:
    """Runs the tests that are named, in a terminal."""
    with contextlib.ExitStack() as stack:

        def start(*args: str) -> Terminal:
            (tmp_path / "test_it.py").write_text(TESTS)
            (tmp_path / "run.py").write_text(RUN)
            mine = ("-p", launches.plugin().__name__)
            found = Terminal(tmp_path / "run.py", *mine, *args, PYTEST_ADDOPTS="", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
            stack.callback(found.close)
            stack.callback(found.process.wait)
            stack.callback(found.process.kill)
            return found

        yield start


def test_a_failure_has_its_prompt_where_the_test_is(run_pytest: Start) -> None:
    terminal = run_pytest("--pdb", "-k", "test_fails or test_without_ranks")
    assert "rank 1 of test_fails() raised AssertionError: assert 20 == 21" in terminal.until("(Pdb, rank 1) ")
    terminal.type("p ten, scale")
    assert "(10, 20)" in terminal.until("(Pdb, rank 1) ")
    terminal.type("q")
    assert "PDB post_mortem" in terminal.until("(Pdb) ")  # pytest's own, of the test without ranks
    terminal.type("p mine")
    assert "3" in terminal.until("(Pdb) ")
    terminal.type("c")
    assert terminal.end() == 1
    assert "assert 20 == 21" in terminal.seen
    assert "rank 0 was in barrier" in terminal.seen
    assert "2 failed" in terminal.seen
    assert terminal.seen.count("PDB post_mortem") == 1


def test_a_breakpoint_stops_a_rank_and_the_test_goes_on(run_pytest: Start) -> None:
    terminal = run_pytest("--pdb", "-k", "test_breaks")
    assert "number += 1" in terminal.until("(Pdb, rank 0) ")
    terminal.type("number = 41")
    terminal.until("(Pdb, rank 0) ")
    terminal.type("c")
    terminal.until("number 42")
    assert terminal.end() == 0
    assert "1 passed" in terminal.seen


def test_a_trace_begins_at_the_first_line_of_each_rank(run_pytest: Start) -> None:
    terminal = run_pytest("--trace", "-k", "test_breaks", "--deselect", "test_it.py::test_without_ranks")
    for _ in range(2):  # one rank after the other, whichever is first
        assert "number = dist.get_rank()" in terminal.until("(Pdb, rank ")
        terminal.type("detach")
    assert terminal.end() == 0


def test_an_expected_failure_asks_as_pytest_does_and_stays_one(run_pytest: Start) -> None:
    terminal = run_pytest("--pdb", "-k", "test_skips_and_fails or fixture_of_the_ranks")
    terminal.until("(Pdb, rank 0) ")
    terminal.type("q")
    assert terminal.end() == 0
    assert "1 passed, " in terminal.seen
    assert "1 xfailed" in terminal.seen
