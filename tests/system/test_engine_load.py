"""Engines under load and in mishap: much output, many calls, logins of all kinds, ends by Slurm, a cut network."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.imported import IMPORTED
from tests.processes import descendants
from tests.system.engine_rigs import Rig, slurm_here, ssh_server, wait_for_jobs

pytestmark = pytest.mark.slow
LIMIT = 120.0
CALLS = 50  # on Slurm, where one takes half a second beside other tests; 200 of them left nothing, either
LINES, WIDTH = 150_000, 1000  # of each of two ranks: 300 MB


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with slurm_here(tmp_path_factory.mktemp("slurm")) as rig:
        yield rig


MUCH = f"""
import sys
from mlaunch import launcher
from mlaunch.engines import Hosts

def work():
    import torch.distributed as dist
    for number in range({LINES}):
        print(f"{{dist.get_rank()}} {{number:06}} ".ljust({WIDTH - 1}, "x"))

launcher(work, 1, engine=Hosts(["a", "b"], ssh=["ssh", "-T", "-F", sys.argv[1]]), output="all", progress=False)()
print("returned")
"""


def test_much_output_through_a_slow_reader(tmp_path: Path) -> None:
    """Who prints waits for who reads, over all that is between them."""
    with ssh_server(tmp_path):
        caller = subprocess.Popen(
            [IMPORTED, "-c", MUCH, str(tmp_path / "ssh.conf")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
        )
        assert caller.stdout is not None
        assert caller.stderr is not None
        seen, other = [0, 0], list[bytes]()
        for line in caller.stdout:
            for _ in range(10):
                hashlib.sha256(line)
            found = re.fullmatch(rb"\[(\d)\] (\d) (\d{6}) x+\n", line)
            if found is None:
                other.append(line)
                continue
            rank = int(found[1])
            assert (int(found[2]), int(found[3]), len(line) - line.index(b" ") - 1) == (rank, seen[rank], WIDTH)
            seen[rank] += 1
        assert (seen, other, caller.stderr.read(), caller.wait(LIMIT)) == ([LINES] * 2, [b"returned\n"], b"", 0)
        caller.stdout.close()
        caller.stderr.close()


def test_many_calls_on_held_machines(slurm: Rig) -> None:
    """None leaves a descriptor or a thread in its caller, in members or in fork servers."""
    caller = Rig(slurm.engine, {**slurm.environ, "SCENE_CALLS": str(CALLS)})
    caller.ask("hold")
    family = descendants(caller.process.pid)
    some, all_of_them = caller.ask("repeated held")["value"]
    assert some == all_of_them
    assert set(descendants(caller.process.pid)) == set(family)
    caller.ask("close")
    caller.close()
    wait_for_jobs(slurm, 0)
