"""A failure in ranks as a CI service reads it: by real runs of pytest and of the command."""

from __future__ import annotations

import os
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.contract.test_rank_tests import run
from tests.system import commands

SUITE = """
import os
import mlaunch
import pytest
import torch.distributed as dist
from helper import check

@pytest.mark.ranks(2)
def test_passes():
    pass

@pytest.mark.ranks(2)
def test_fails():
    check(dist.get_rank())
    dist.barrier()

@pytest.mark.ranks(2)
@pytest.mark.xfail
def test_expected():
    raise ValueError

@pytest.mark.ranks(2)
def test_exits():
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()

def test_of_a_launch():
    mlaunch.launcher(lambda: check(dist.get_rank()), 2, device_type="cpu")()

def test_without_ranks():
    raise ValueError

@pytest.mark.ranks(2)
def test_at_the_second_time(marker):
    assert marker

@pytest.fixture
def marker():
    import pathlib
    there = pathlib.Path("marker").exists()
    pathlib.Path("marker").touch()
    return there
"""
REPEATS = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    if "second" in item.name:
        for report in runtestprotocol(item, nextitem=nextitem, log=False):
            pass  # as plugins do that repeat what fails: nobody hears of it
        item._initrequest()
"""
HELPER = "def check(rank):\n    if rank == 1:\n        raise ValueError('50%,\\nrank: 1')\n"


def properties_of(case: ElementTree.Element) -> dict[str, str | None]:
    return {one.get("name", "").removeprefix("mlaunch."): one.get("value") for one in case.iter("property")}


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], pytest.param(["-p", "xdist", "-n", "1"], marks=pytest.mark.nightly)])
def test_a_run_of_pytest(tmp_path: Path, flags: list[str]) -> None:
    """Also by a worker of xdist, whose reports pytest's own process turns into a file and annotations."""
    pytest.importorskip("torch", reason="the tests run on ranks")
    files, host = {"test_it.py": SUITE, "helper.py": HELPER, "conftest.py": REPEATS}, os.uname().nodename
    flags = [*flags, "--junitxml", str(junit := tmp_path / "junit.xml")]
    github = {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(tmp_path)}
    _, printed = run(tmp_path, files, *flags, **github)
    found = {case.get("name"): properties_of(case) for case in ElementTree.parse(junit).iter("testcase")}
    raised = {"kind": "raised", "rank": "1", "host": host, "place": "helper.py:3"}
    assert found == {
        "test_passes": {"ranks": "2"},
        "test_fails": {"ranks": "2", **raised},
        "test_expected": {"ranks": "2"},
        "test_exits": {"ranks": "2", "kind": "exited", "rank": "1", "host": host},
        "test_of_a_launch": raised,
        "test_without_ranks": {},
        "test_at_the_second_time": {"ranks": "2"},
    }, printed
    fails, launch, exits = sorted(line for line in printed.splitlines() if line.startswith("::"))
    title = "title=test_it.py%3A%3Atest_{}%2C rank 1%3A {}::"
    assert fails == f"::error file=helper.py,line=3,{title.format('fails', 'ValueError')}ValueError: 50%25,%0Arank: 1"
    assert launch.startswith(f"::error file=helper.py,line=3,{title.format('of_a_launch', 'ValueError')}")
    # Where the rank was is not known: the test is shown.
    assert exits.startswith(f"::error file=test_it.py,line=22,{title.format('exits', 'exited')}")
    assert "rank 1 of test_exits exited with code 3" in exits


@pytest.mark.slow
def test_a_run_of_the_command(tmp_path: Path) -> None:
    """Once, however often it was started again; and nothing of it without GitHub."""
    pytest.importorskip("torch", reason="the script runs on ranks")
    (tmp_path / "helper.py").write_text(HELPER)
    script = commands.write(tmp_path, "import os, helper\nhelper.check(int(os.environ['RANK']))\n")
    flags = ("--nproc-per-node", "2", "--max-restarts", "1", script)
    for actions, count in (("true", 1), ("", 0)):
        done = commands.run(tmp_path, *flags, GITHUB_ACTIONS=actions, GITHUB_WORKSPACE=str(tmp_path), CI="true")
        shown = [line for line in done.stderr.splitlines() if line.startswith("::")]
        assert (done.returncode, len(shown), done.stdout) == (1, count, "")
        if shown:
            assert shown[0].startswith("::error file=helper.py,line=3,title=rank 1 of train.py%3A ValueError::")
            assert "raised ValueError: 50%25,%0Arank: 1" in shown[0]
