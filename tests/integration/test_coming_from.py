"""The listings of docs/coming_from: what is shown there before and after a port runs, and prints the same."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.imported import IMPORTED
from tests.integration.libraries import needs
from tests.system.commands import MLAUNCH, TORCHRUN, run

pytestmark = pytest.mark.integration
PAGES = ROOT / "docs" / "coming_from"
LISTINGS = PAGES / "listings"
FORKING = """
import functools, runpy, sys
import mlaunch

mlaunch.launcher = functools.partial(mlaunch.launcher, start_method="fork")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
BY_FORK = [IMPORTED, "-c", FORKING]  # so that each library is imported once, by the script, and not by each rank
TWO = ["--nproc-per-node", "2"]
ACCELERATE = ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]  # else it is one process on CPUs
BEFORE = {  # what starts a page's first listing, and what that needs
    "torchrun": ([*TORCHRUN, "--standalone", *TWO], ()),
    "spawn": ([IMPORTED], ()),
    "fork": ([IMPORTED], ()),
    "accelerate_launch": ([IMPORTED, "-m", "accelerate.commands.launch", *ACCELERATE], ("accelerate",)),
    "notebook_launcher": ([IMPORTED], ("accelerate",)),
    "lightning": ([IMPORTED], ("lightning",)),
    "detectron2": ([IMPORTED], ()),
    "megengine": ([IMPORTED], ()),
    "colossalai": ([*TORCHRUN, "--standalone", *TWO], ()),
}
UNAVAILABLE = {"detectron2", "megengine", "colossalai"}  # as wheels for the Python and torch of the tests
PLAIN = ("torchrun", "spawn", "detectron2", "megengine")  # the second is a script that this process itself can be
OPTIMIZING = {"megengine": pytest.mark.slow}  # each rank imports what torch's optimizers need
STARTED = {  # the others are started: a library that changes its process, or a command
    "fork": ([IMPORTED], ()),
    "accelerate_launch": (BY_FORK, ("accelerate",)),
    "notebook_launcher": (BY_FORK, ("accelerate",)),
    "lightning": (BY_FORK, ("lightning",)),
    "colossalai": ([*MLAUNCH, *TWO], ()),
}
RESULTS = {
    "torchrun": r"loss of rank 0: 0\.001\d",
    "spawn": r"pi is about 3\.1[34]\d\d",
    "fork": r"pi is about 3\.1[34]\d\d",
    "accelerate_launch": r"loss \d\.\d{4}",
    "notebook_launcher": r"loss \d\.\d{4}",
    "lightning": r"sum of weights \d\.\d{4}",
    "detectron2": r"pi is about 3\.1[34]\d\d, from 200000 samples",
    "megengine": r"sum of weights on each rank: \[3\.0, 3\.0\]",
    "colossalai": r"pi is about 3\.1[34]\d\d",
}
_printed: dict[str, str] = {}  # by the second listings, each of which runs once


def last_line(stdout: str) -> str:
    """Without the rank that mlaunch puts in front of what a rank prints."""
    lines = stdout.strip().splitlines() or [""]
    return lines[-1].removeprefix("[0] ")


def start(folder: Path, listing: str, command: list[str]) -> str:
    done = run(folder, str(LISTINGS / listing), command=command)
    assert done.returncode == 0, done.stderr
    return last_line(done.stdout)


def be(listing: str) -> str:
    """Runs a listing as the script of this process."""
    before, sys.argv = sys.argv, [str(LISTINGS / listing)]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv = before
    return last_line(said.getvalue())


def be_second(page: str) -> str:
    if page not in _printed:
        _printed[page] = be(f"{page}_after.py")
    return _printed[page]


def start_second(folder: Path, page: str) -> str:
    if page not in _printed:
        command, libraries = STARTED[page]
        needs(*libraries)
        _printed[page] = start(folder, f"{page}_after.py", command)
    return _printed[page]


@pytest.mark.parametrize("page", [pytest.param(page, marks=OPTIMIZING.get(page, ())) for page in PLAIN])
def test_after_as_a_script(page: str) -> None:
    assert re.fullmatch(RESULTS[page], be_second(page))


@pytest.mark.nightly("lightning", "colossalai", "accelerate_launch")
@pytest.mark.slow
@pytest.mark.parametrize("page", STARTED)
def test_after_in_a_process_of_its_own(tmp_path: Path, page: str) -> None:
    assert re.fullmatch(RESULTS[page], start_second(tmp_path, page))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("page", BEFORE)
def test_before_and_after_print_the_same(tmp_path: Path, page: str) -> None:
    command, libraries = BEFORE[page]
    if page in UNAVAILABLE and importlib.util.find_spec(page) is None:
        pytest.skip(f"{page} is not installed; its listing is compiled, and only the port is run")
    needs(*libraries)
    after = be_second(page) if page in PLAIN else start_second(tmp_path, page)
    assert start(tmp_path, f"{page}_before.py", command) == after


@pytest.mark.slow
def test_a_script_of_torchrun_is_unchanged(tmp_path: Path) -> None:
    printed = start(tmp_path, "torchrun_before.py", [*MLAUNCH, *TWO])
    assert printed == be_second("torchrun")


def test_no_listing_is_forgotten() -> None:
    """Each is a program, is shown by the page of its name and run by a test of this file."""
    pages = {page.stem: page.read_text() for page in PAGES.glob("*.rst") if page.stem != "index"}
    assert pages.keys() == BEFORE.keys() == RESULTS.keys() == {*PLAIN, *STARTED}
    found = {path.name: path for path in LISTINGS.iterdir() if path.suffix == ".py"}
    assert sorted(found) == sorted(f"{page}_{when}.py" for page in pages for when in ("before", "after"))
    for name, path in found.items():
        compile(path.read_text(), name, "exec")
        assert f".. literalinclude:: listings/{name}\n" in pages[name.rpartition("_")[0]]


def test_each_page_is_in_the_overview() -> None:
    overview = (PAGES / "index.rst").read_text()
    for page in BEFORE:
        assert f"\n   {page}\n" in overview
        assert f" <{page}>`" in overview
