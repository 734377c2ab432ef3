"""Engines under load and in mishap: much output, many calls, logins of all kinds, ends by Slurm, a cut network."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from operator import gt
from pathlib import Path

import pytest

from mlaunch import launcher
from mlaunch.engines import Hosts
from tests.conftest import ROOT
from tests.imported import IMPORTED
from tests.processes import descendants, wait_gone, wait_until
from tests.system.engine_rigs import Rig, slurm_here, ssh_between, ssh_server, wait_for_jobs
from tests.system.network import Namespaces, why_no_namespaces

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
LIMIT = 120.0
GIANT = 1 << 30  # bytes
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
    grown = [(early, late) for early, late in zip(some, all_of_them, strict=True) if any(map(gt, late, early))]
    assert not grown  # fewer is a thread of an earlier call that has ended
    assert set(descendants(caller.process.pid)) == set(family)
    caller.ask("close")
    caller.close()
    wait_for_jobs(slurm, 0)


def test_a_node_that_goes_down(slurm: Rig) -> None:
    """It is named in Slurm's words, and the next call gets nodes once it is up again."""
    slurm.ask("hold")
    slurm.say("cut held")
    assert slurm.hear() == {"runs": True}
    node = ["scontrol", "update", "NodeName=n2", "Reason=test"]
    subprocess.run([*node, "State=DOWN"], env=slurm.environ, check=True)
    found = slurm.hear()
    assert found["error"] == "LaunchError"
    assert re.search(r"was lost: NODE_FAIL \(job \d+, node n\d\)", found["text"]), found["text"]
    # Its daemon may have said so first.
    subprocess.run([*node[:-1], "State=RESUME"], env=slurm.environ, check=False, capture_output=True)
    assert slurm.ask("whole")["value"] == [0, 1, 2, 3]
    slurm.ask("close")
    wait_for_jobs(slurm, 0)


def test_a_rank_that_needs_more_memory_than_its_step_has(slurm: Rig, tmp_path: Path) -> None:
    group = Path(f"/sys/fs/cgroup/memory/mlaunch-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    (group / "memory.limit_in_bytes").write_text(str(2 << 30))
    python = tmp_path / "python"  # which enters it, as Slurm has a step do where it bounds memory
    python.write_text(f'#!/bin/sh\necho $$ >{group}/cgroup.procs\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    caller = Rig(slurm.engine.replace("time=", f"python={str(python)!r}, time="), slurm.environ)
    found = caller.ask("memory")
    caller.close()
    wait_for_jobs(slurm, 0)
    wait_until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()
    assert found["error"] == "LaunchError", found
    assert found["text"].startswith("rank 3 of memory.<locals>.fill() was killed by SIGKILL\n"), found["text"]
    assert re.search(r"memory\.oom_control\) rose by [1-9] while this rank ran", found["text"]), found["text"]


PASSWORD = """
import sys
from mlaunch import LaunchError, launcher
from mlaunch.engines import Hosts

try:
    launcher(int, 1, engine=Hosts(["a"], ssh=["ssh", "-T", "-F", sys.argv[1]]), progress=False)()
except LaunchError as error:
    print(error)
"""


@pytest.mark.parametrize("asks", [False, True])
def test_a_password_is_asked_for(tmp_path: Path, asks: bool) -> None:
    """Nobody is asked at the caller's terminal, also where ``ssh=`` would have it so: the call ends at once."""
    with ssh_server(tmp_path):
        (tmp_path / "authorized").write_text("")
        conf = tmp_path / "ssh.conf"
        conf.write_text(conf.read_text().replace("BatchMode yes", f"BatchMode {'no' if asks else 'yes'}"))
        words = at_a_terminal([sys.executable, "-c", PASSWORD, str(conf)])
    assert "password:" not in words
    assert "root@127.0.0.1: Permission denied (publickey,password" in words
    assert "ssh must reach a without a question" in words


def at_a_terminal(command: list[str]) -> str:
    """Returns what a command shows there."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(command[0], command)
    said = b""
    with contextlib.suppress(OSError):  # so ends what a terminal says
        while data := os.read(terminal, 65536):
            said += data
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0, said
    return said.decode().replace("\r", "")


def test_a_connection_that_several_calls_share(tmp_path: Path) -> None:
    """``ControlMaster``: an ssh of the first call stays in the background, as the user has it, and holds up nobody."""
    with ssh_server(tmp_path):
        conf = tmp_path / "ssh.conf"
        socket = tmp_path / "control"
        conf.write_text(f"{conf.read_text()}  ControlMaster auto\n  ControlPath {socket}\n  ControlPersist yes\n")
        ssh = ["ssh", "-T", "-F", str(conf)]
        call = launcher(os.getpid, 1, engine=Hosts(["a", "b"], ssh=ssh), machines=2, progress=False)
        try:
            assert len(set(call())) == 2
            assert socket.is_socket()
            assert len(set(call())) == 2
        finally:
            subprocess.run([*ssh, "-O", "exit", "a"], check=True, capture_output=True)


@pytest.mark.parametrize("way", ["argument", "value"])
def test_a_network_that_is_cut_in_the_middle_of_a_large_value(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host is named, and nothing stays on either side."""
    if why := why_no_namespaces():
        pytest.skip(why)
    monkeypatch.setenv("SCENE_HEARTBEAT", "10")
    network = Namespaces(3)
    receiver = 2 if way == "argument" else 0
    try:
        with ssh_between(network.hosts, tmp_path) as rig:
            conf = tmp_path / "ssh.conf"
            conf.write_text(f"{conf.read_text()}  ServerAliveInterval 2\n  ServerAliveCountMax 5\n")  # as ours has it
            before_it = descendants(os.getpid())
            assert rig.ask("hold") == ["h2", "h3"]
            before = network.received(receiver)
            rig.say(f"giant_{way} held")
            wait_until(lambda: network.received(receiver) - before > GIANT // 4)
            network.cable(2, "down")
            found = rig.hear()
            assert found["error"] == "LaunchError", found
            assert "host h3" in found["text"].splitlines()[0], found["text"]
            new = set(descendants(os.getpid())) - set(before_it)
            there = [pid for pid in new if Path(f"/proc/{pid}/comm").read_text() != "sshd\n"]
            rig.ask("close")
            wait_gone(there, LIMIT)  # sshd of the host that is cut off waits for who does not answer any more
    finally:
        network.close()
