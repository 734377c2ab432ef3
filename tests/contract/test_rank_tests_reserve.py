"""Ranks in reserve: a test that loses its ranks costs the next one little."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.test_rank_tests import outcomes, run

SUITE = """
import os, pathlib, signal, time
import pytest, torch.distributed as dist

def parent_of(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

def ranks_there():
    '''The ranks of all agents of this fork server.'''
    server, found = parent_of(os.getppid()), set()
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if b"rank" in (entry / "comm").read_bytes() and parent_of(parent_of(int(entry.name))) == server:
                found.add(int(entry.name))
        except OSError:
            continue
    return found

@pytest.mark.ranks(2)
def test_first():
    dist.barrier()

@pytest.mark.ranks(2)
def test_lost():
    dist.barrier()
    if dist.get_rank() == 0:
        end = time.monotonic() + {wait}
        while len(found := ranks_there()) < 4 and time.monotonic() < end:
            time.sleep(0.01)
        pathlib.Path("there").write_text(" ".join(map(str, found)))
    dist.barrier()
    if dist.get_rank() == 1:
        {how}
    dist.barrier()

@pytest.mark.ranks(2)
def test_next(record_property):
    record_property("was there", str(os.getpid()) in pathlib.Path("there").read_text().split())
    total = [None, None]
    dist.all_gather_object(total, dist.get_rank())
    assert total == [0, 1]

@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range(12))
def test_later(number):
    dist.barrier()
"""


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError"])
def test_the_next_test_runs_on_ranks_that_were_there(tmp_path: Path, how: str) -> None:
    found, printed = run(tmp_path, {"test_it.py": SUITE.replace("{how}", how).replace("{wait}", "60")})
    reports = {report["name"].rpartition("::")[2]: report for report in found.values()}
    failed = {name for name, outcome in outcomes(reports).items() if outcome != "passed"}
    assert failed == {"test_lost"}, printed
    assert reports["test_next"]["properties"]["was there"]


def test_there_are_none_where_none_are_wanted(tmp_path: Path) -> None:
    text = SUITE.replace("{how}", "raise ValueError").replace("{wait}", "0")
    found, printed = run(tmp_path, {"test_it.py": text}, "-o", "ranks_reserve=false")
    reports = {report["name"].rpartition("::")[2]: report for report in found.values()}
    assert not reports["test_next"]["properties"]["was there"], printed
