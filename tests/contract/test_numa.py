"""``numa=``: real ranks on the CPUs that they are given, from their first thread on, and never on others."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlaunch import LaunchError, Ranks, launcher
from tests import launches
from tests.contract.preparing import prepared, preparing
from tests.contract.test_engine_calls import Threads
from tests.system import commands

USABLE = sorted(os.sched_getaffinity(0))
FIRST, LAST = USABLE[0], USABLE[-1]
EACH = f"{FIRST};{LAST}"
Found = tuple[set[str], str, str]

pytestmark = pytest.mark.usefixtures("the_next_call_works")


def found() -> Found:
    """The CPUs of all threads, where memory comes from, and for how many threads parallel operations are."""
    masks = set()
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/status") as status:
            masks.add(status.read().partition("Cpus_allowed_list:")[2].split()[0])
    with open("/proc/self/numa_maps") as maps:
        policy = maps.readline().split()[1].partition(":")[0]
    return masks, policy, os.environ["OMP_NUM_THREADS"]


@pytest.fixture
def usual_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The first and the last of these CPUs, each on a node of its own; the second has no memory."""
    nodes = tmp_path / "sys/devices/system/node"
    nodes.mkdir(parents=True)
    for name, text in {"online": "0-1", "has_memory": "0"}.items():
        (nodes / name).write_text(f"{text}\n")
    for node, cpu in enumerate((FIRST, LAST)):
        (nodes / f"node{node}").mkdir()
        (nodes / f"node{node}/cpulist").write_text(f"{cpu}\n")
    launches.be_on_machine(monkeypatch, tmp_path)
    yield tmp_path
    shutil.rmtree(tmp_path / "sys")


@pytest.mark.usefixtures("usual_threads")
def test_lists_by_local_rank_also_of_ranks_that_were_prepared() -> None:
    call = launcher(found, 2, numa=EACH, numa_memory="bind")
    expected = [({str(FIRST)}, "bind", "1"), ({str(LAST)}, "bind", "1")]
    with preparing():
        for _ in range(2):
            assert call() == expected
            assert call.last is not None
            assert [row.place.partition(", ")[2] for row in call.last.ranks] == [
                f"CPU {cpu}, memory bound" for cpu in (FIRST, LAST)
            ]
            waiting = [rank["place"] for rank in prepared()["ranks"]]
            assert all("CPU " in place for place in waiting)
        if len(USABLE) > 1:  # a caller that may use fewer than before
            os.sched_setaffinity(0, {LAST})
            try:
                with pytest.raises(ValueError, match=rf"numa='{EACH}', numa_memory='bind': CPU {FIRST}, for local rank "
                                                     r"0, cannot be used here; allowed: those of CPU "):  # fmt: skip
                    call()
                assert launcher(found, 1, numa="node")()[0][0] == {str(LAST)}
            finally:
                os.sched_setaffinity(0, USABLE)


@pytest.mark.usefixtures("two_nodes", "usual_threads")
def test_ranks_that_stay_on_nodes(capfd: pytest.CaptureFixture[str]) -> None:
    """Where a node has no memory, its CPUs count all the same, which is said once."""
    with Ranks(n_gpus=2, numa="node", numa_memory="preferred") as ranks:
        first, second = ranks.run(found)
        places = [f"node {node}, CPU {cpu}" for node, cpu in enumerate((FIRST, LAST))]
        assert [rank["place"] for rank in launches.own_statuses()[0]["ranks"]] == [
            f"{places[0]}, memory preferred", places[1]
        ]  # fmt: skip
        assert ranks.run(found) == [first, second]
        assert ranks.last is not None
        assert [row.place for row in ranks.last.ranks][1] == places[1]
        assert f"{places[0]}, memory preferred" in str(ranks.last)
        if len(USABLE) > 1:
            assert (first[:2], second[:2]) == (({str(FIRST)}, "prefer"), ({str(LAST)}, "default"))
    said = capfd.readouterr().err
    words = "numa='node', numa_memory='preferred': memory comes from any node: this process may not use the memory "
    assert said.count(words) == 1, said


def test_nothing_is_bound_where_the_system_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    launches.be_on_machine(monkeypatch, tmp_path)
    masks = launcher(lambda: sorted(os.sched_getaffinity(0)), 2, numa="node")
    assert masks() == [USABLE] * 2
    assert masks.last is not None
    assert "place" not in str(masks.last)
    words = ("numa='node': ranks 0-1 are not bound: this system does not say which CPUs are near (no "
             "/sys/devices/system/node)")  # fmt: skip
    assert capfd.readouterr().err.count(words) == 1


def test_on_machines_of_an_engine_each_by_its_own_files() -> None:
    engine = Threads()
    call = launcher(found, 1, engine=engine, machines=2, numa=str(LAST))
    assert [masks for masks, _, _ in call()] == [{str(LAST)}] * 2
    assert call.last is not None
    assert all(row.place.endswith(f"CPU {LAST}") for row in call.last.ranks)
    with pytest.raises(ValueError, match=r"numa='100000': CPU 100000, for local rank 0, cannot be used here") as caught:
        launcher(found, 1, engine=engine, machines=2, numa="100000")()
    assert isinstance(caught.value.__cause__, LaunchError)


@pytest.mark.ranks(2, numa=EACH, numa_memory="bind")
def test_tests_on_ranks() -> None:
    masks, policy, _ = found()
    assert (masks, policy) == ({str(*os.sched_getaffinity(0))}, "bind")


def test_threads_are_the_users_where_he_has_said_how_many() -> None:
    assert launcher(found, 1, numa=str(LAST), env={"OMP_NUM_THREADS": "3"})()[0][2] == "3"


SCRIPT = """
import os, torch
from tests.contract.test_numa import found
print(os.environ["LOCAL_RANK"], *sorted(found()[0]), found()[1], torch.cuda.is_initialized(), flush=True)
"""


@pytest.mark.slow
def test_a_command_without_numactl_and_with_cuda_asleep(tmp_path: Path) -> None:
    """Its first line finds all bound; nothing has looked at a device."""
    script = commands.write(tmp_path, SCRIPT)
    flags = ["--numa-binding", EACH, "--numa-memory=bind", "--nproc-per-node=2", script]
    done = commands.run(tmp_path, *flags, PATH="/none")
    assert sorted(done.stdout.splitlines()) == [f"{rank} {cpu} bind False" for rank, cpu in enumerate((FIRST, LAST))]
    done = commands.run(tmp_path, "--numa-binding=node", "--virtual-local-rank", *flags[3:])
    assert done.returncode == 0, done.stderr
    done = commands.run(tmp_path, "--numa-binding=0", *flags[3:])
    assert done.stderr == (
        "mlaunch run: --numa-binding 0: 1 list(s) of CPUs for 2 ranks on this machine; allowed: one for each, with "
        "semicolons between them\n"
    )


@pytest.mark.nightly
@pytest.mark.slow
def test_never_wider_than_a_cpuset(tmp_path: Path) -> None:
    """A real one, of a control group, into which a caller goes that may use one CPU from then on."""
    root = Path("/sys/fs/cgroup/cpuset")
    group = root / f"mlaunch-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cpuset can be made here: {error}")
    (group / "cpuset.mems").write_text((root / "cpuset.mems").read_text())
    (group / "cpuset.cpus").write_text(str(LAST))
    script = f"""
import os
open("{group}/cgroup.procs", "w").write(str(os.getpid()))
from mlaunch import launcher
from tests.contract.test_numa import found
if __name__ == "__main__":
    print(launcher(found, 2, numa="node", output="none")())
"""
    try:
        done = commands.run(tmp_path, commands.write(tmp_path, script), command=[sys.executable])
    finally:
        group.rmdir()
    assert re.findall(r"\{'([^']*)'\}", done.stdout) == [str(LAST)] * 2, done.stderr
