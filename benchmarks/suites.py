"""Suites of tests on ranks, as text, and what runs one of them by pytest and looks at the clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_ENOUGH = 1800.0  # seconds for a suite

_CONFTEST = """
import json, time
import pytest

times = {"begun": time.monotonic(), "tests": []}

def pytest_collection_finish():
    times["collected"] = time.monotonic()

def pytest_runtest_logreport(report):
    if report.when == "call" or report.failed:
        times["tests"].append((report.outcome, time.monotonic()))

@pytest.hookimpl(trylast=True)
def pytest_unconfigure():
    times["ended"] = time.monotonic()
    with open("times.json", "w") as file:
        json.dump(times, file)
"""

_BODY = """
    x = torch.ones(3) * dist.get_rank()
    dist.all_reduce(x)
    assert x[0] == {total}
"""

RANKS = """
import pytest, torch, torch.distributed as dist

@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range({count}))
def test_it(number):
""" + _BODY.format(total=1)  # fmt: skip

ALONE = """
import pytest, torch, torch.distributed as dist

@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()

@pytest.mark.parametrize("number", range({count}))
def test_it(number):
""" + _BODY.format(total=0)  # fmt: skip

# What two processes cost that do nothing but the bodies, each when a byte has come.
BARE = """
import os, socket
import pytest, torch, torch.distributed as dist

def body():
""" + _BODY.format(total=1) + """
def live(rank, channel, path):
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    while channel.recv(1):
        body()
        channel.send(b".")

@pytest.fixture(scope="module")
def channels(tmp_path_factory):
    path, ours = str(tmp_path_factory.mktemp("store") / "store"), []
    for rank in range(2):
        our, their = socket.socketpair()
        if os.fork() == 0:
            for channel in (our, *ours):
                channel.close()
            try:
                live(rank, their, path)
            finally:
                os._exit(0)
        their.close()
        ours.append(our)
    yield ours
    for channel in ours:
        channel.close()
        os.wait()

@pytest.mark.parametrize("number", range({count}))
def test_it(number, channels):
    for channel in channels:
        channel.send(b".")
    assert all([channel.recv(1) for channel in channels])
"""  # fmt: skip

PROCESSES = """
import torch, torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

def body(self):
    store = dist.FileStore(self.file_name, self.world_size)
    dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
""" + _BODY.format(total=1) + """
class TestIt(MultiProcessTestCase):
    world_size = 2
    def setUp(self):
        super().setUp()
        self._spawn_processes()

for number in range({count}):
    setattr(TestIt, f"test_{{number}}", body)
"""  # fmt: skip

CONTINUOUS = """
import torch, torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest

def body(self):
""" + _BODY.format(total=1) + """
class TestIt(MultiProcContinuousTest):
    world_size = 2
    device_type = "cpu"
    @classmethod
    def backend_str(cls): return "gloo"

for number in range({count}):
    setattr(TestIt, f"test_{{number}}", body)
"""  # fmt: skip

# Each bad test notes when it goes wrong, and each next one when its body begins. It stands among others.
AFTERWARDS = """
import os, signal, time
import pytest, torch.distributed as dist

def note(what):
    if dist.get_rank() == 0:
        with open("notes", "a") as file:
            file.write(f"{{what}} {{time.monotonic()}}\\n")

@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range(200))
def test_first(number): dist.barrier()

@pytest.mark.ranks(2, deadline={deadline})
def test_bad():
    dist.barrier()
    note("bad")
    if dist.get_rank() == 1: {how}
    dist.barrier()

@pytest.mark.ranks(2)
def test_next(): note("next")

@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range(20))
def test_later(number): dist.barrier()
"""

_RESIDENT = """
def resident():
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private_Dirty")) / 1024
"""
_NOTE = """
    if number in (99, {count} - 1) and dist.get_rank() == 0:
        with open("notes", "a") as file:
            file.write(f"{{number}} {{resident()}}\\n")
"""
MEMORY = {
    "mlaunch": RANKS + _NOTE + _RESIDENT,
    "one process": ALONE + _NOTE + _RESIDENT,
}


@dataclass(frozen=True)
class Timed:
    """How long a suite took: all of pytest's own time, and from the end of collection; in seconds.

    ``ends``: of the tests, from the end of collection. ``notes``: what tests have noted, in order.
    """

    all: float
    tests: float
    ends: tuple[float, ...]
    notes: tuple[tuple[str, float], ...]


def timed(suite: str, failures: int = 0, **values: object) -> Timed:
    """Runs a suite in a pytest of its own. RuntimeError if not so many fail."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "conftest.py").write_text(_CONFTEST, encoding="utf-8")
        (place / "test_it.py").write_text(suite.format(**values), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "mlaunch.pytest.plugin", "-p", "no:cacheprovider"]
        environ = {**os.environ, "PYTHONPATH": str(_ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
        done = subprocess.run(
            command, cwd=place, env=environ, capture_output=True, encoding="utf-8", timeout=_ENOUGH, check=False
        )
        if not (place / "times.json").exists():
            raise RuntimeError(done.stdout[-1000:] + done.stderr[-1000:])
        found = json.loads((place / "times.json").read_text(encoding="utf-8"))
        notes = (place / "notes").read_text(encoding="utf-8").splitlines() if (place / "notes").exists() else []
    if not found["tests"] or sum(outcome != "passed" for outcome, _ in found["tests"]) != failures:
        raise RuntimeError(done.stdout[-1000:])
    since = found["collected"]
    pairs = tuple((word, float(number)) for word, number in map(str.split, notes))
    ends = tuple(at - since for _, at in found["tests"])
    return Timed(found["ended"] - found["begun"], found["ended"] - since, ends, pairs)
