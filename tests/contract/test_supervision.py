"""What an agent, a fork server and a caller see to while ranks run, and when several things go wrong at once."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mlaunch import LaunchError, launcher
from tests.conftest import ROOT
from tests.contract import crashes, functions
from tests.imported import IMPORTED
from tests.processes import alive, descendants, wait_gone


def test_an_ended_ranks_children_die_while_others_run(tmp_path: Path) -> None:
    def train() -> bool:
        note = tmp_path / "child"
        if dist.get_rank() == 0:
            child = subprocess.Popen(["sleep", "1000"])
            (tmp_path / "new").write_text(str(child.pid))
            (tmp_path / "new").rename(note)
            os._exit(0)
        while not note.exists():
            signal.sigtimedwait([], 0.01)
        child_of_0 = int(note.read_text())
        wait_gone([child_of_0])
        return alive(child_of_0)

    with pytest.warns(RuntimeWarning, match="^rank 0 of .* exited with code 0 without"):
        assert launcher(train, 2)() == [None, False]


def test_agent_and_fork_server_killed_together() -> None:
    def train() -> None:
        if dist.get_rank() == 0:
            server, agent = crashes.fork_server_of_a_rank(), os.getppid()
            os.kill(server, signal.SIGSTOP)  # so that it reaps nothing
            subprocess.Popen(["kill", "-KILL", str(agent), str(server)])  # the agent's end is this rank's, too
        crashes.hang()

    with pytest.raises(LaunchError, match=r"train\(\) was ended: the fork server .* was killed by SIGKILL"):
        launcher(train, 2)()
    assert functions.launched(1) == [10, 11]


@pytest.mark.parametrize("start_method", ["forkserver", "fork", "spawn"])
def test_a_scheduler_that_signals_all_processes_of_a_job(start_method: str) -> None:
    """Agent and fork server leave it to the caller to end the launch."""

    def train() -> int:
        for pid in (os.getppid(), crashes.fork_server_of_a_rank()):
            os.kill(pid, signal.SIGTERM)
        return dist.get_rank()

    assert launcher(train, 2, start_method=start_method)() == [0, 1]


FORKING = """
import os, signal, sys, threading, warnings
from mlaunch import launcher

def train():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print("running", flush=True)
    signal.pause()

def fork():
    if os.fork() == 0:  # with all that this process holds
        sys.stdin.read()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)

warnings.simplefilter("ignore")  # of a fork beside threads
call = launcher(train, 1, start_method=sys.argv[1], grace_period=1)
threading.Thread(target=lambda: (sys.stdin.readline(), fork())).start()
call()
"""


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_a_fork_of_the_caller_that_outlives_it(start_method: str) -> None:
    """It does not keep the launch's sockets open."""
    process = subprocess.Popen(
        [IMPORTED, "-c", FORKING, start_method],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"[0] running\n"
    family = descendants(process.pid)
    assert len(family) == 3  # fork server, agent, rank
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert process.wait(60) == -signal.SIGKILL
    wait_gone(family)
    process.stdin.close()  # and with it the fork
    assert process.stdout.read() == b""
    process.stdout.close()


FORKING_IN_C = """
import ctypes, os, signal, sys
from mlaunch import launcher
from mlaunch.caller.warm_server import warm_server

launcher(lambda: None, 1)()
if ctypes.PyDLL(None).fork() == 0:
    sys.stdin.read()
    os._exit(0)
print(warm_server.get(os.environ).pid, flush=True)
signal.pause()
"""


@pytest.mark.slow
def test_a_fork_in_c_that_outlives_the_caller() -> None:
    """It runs none of Python's hooks, and so keeps the fork server's socket open."""
    command = [IMPORTED, "-c", FORKING_IN_C]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        server = int(process.stdout.readline())
        process.kill()
        process.wait(60)
        wait_gone([server])
        process.stdin.close()  # and with it the fork
        assert process.stdout.read() == b""


def test_the_fork_servers_surroundings(run_script: Any) -> None:
    """It has the user's tunables of glibc beside its own, which no rank gets, and keeps no file system busy."""
    done = run_script(
        "import os\n"
        "os.environ['GLIBC_TUNABLES'] = 'glibc.malloc.check=0'\n"
        "from pathlib import Path\n"
        "from mlaunch import launcher\n"
        "from tests.processes import children\n"
        "print(launcher(lambda: os.environ['GLIBC_TUNABLES'], 1)(), launcher(os.getcwd, 1)() == [os.getcwd()])\n"
        "[server] = children(os.getpid())\n"
        "environ = Path(f'/proc/{server}/environ').read_text().split('\\0')\n"
        "tunables = [row for row in environ if 'glibc' in row]  # glibc itself cuts them apart\n"
        "print(':'.join(tunables), os.readlink(f'/proc/{server}/cwd'))\n"
    )
    assert done.stdout.splitlines() == [
        "['glibc.malloc.check=0'] True",
        "GLIBC_TUNABLES=glibc.malloc.check=0:glibc.malloc.hugetlb=1 /",
    ], done.stderr
