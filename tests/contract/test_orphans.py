"""Nothing outlives a caller that is killed: the crash matrix's last column."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from mlaunch import LaunchError, Ranks, launcher
from tests import launches
from tests.conftest import ROOT
from tests.contract.families import start_family
from tests.imported import IMPORTED
from tests.processes import agents, children, wait_gone, wait_until


@pytest.mark.nightly(
    "nohup-caller-fork",
    "-fork server-spawn",
    "-agent-fork",
    "nohup-caller-spawn",
    "nohup-fork server-fork",
    "nohup-agent-spawn",
    "nohup-agent-forkserver",
    "-caller-forkserver",
    "nohup-fork server-forkserver",
)
@pytest.mark.parametrize("start_method", ["forkserver", "fork", "spawn"])
@pytest.mark.parametrize("victim", ["caller", "fork server", "agent"])
@pytest.mark.parametrize("nohup", [False, True], ids=["", "nohup"])
def test_no_orphans(start_method: str, victim: str, nohup: bool) -> None:
    family = start_family(start_method, under=["nohup", "sh", "-c", 'trap "" INT; exec "$0" "$@"'] if nohup else [])
    assert len(family.everyone) == 5  # caller, fork server, agent, two ranks
    os.kill(family.pids[victim], signal.SIGKILL)
    family.wait()
    wait_gone(family.everyone)


STOPPING = """
import os, signal, subprocess, sys
from mlaunch import launcher

def train(caller):
    import torch.distributed as dist
    dist.barrier()
    if dist.get_rank() == 0:
        daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        with open(sys.argv[1], "w") as note:
            print(daemon.pid, os.getppid(), file=note)
        os.kill(os.getppid(), signal.SIGSTOP)
        os.kill(caller, signal.SIGKILL)
    signal.pause()

launcher(train, 2)(os.getpid())
"""


def test_a_stopped_agent_and_a_daemon_end_with_the_caller(tmp_path: Path) -> None:
    """The fork server, which is left, ends both."""
    note = tmp_path / "pids"
    done = subprocess.run([IMPORTED, "-c", STOPPING, str(note)], cwd=ROOT, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    wait_gone([int(pid) for pid in note.read_text().split()])


KILLED = """
import os, signal, subprocess
from mlaunch import launcher

def train():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, flush=True)
    signal.pause()

launcher(train, 1, output="raw", grace_period=600)()
"""


@pytest.mark.slow
def test_a_daemon_ends_though_the_agent_is_killed_after_the_caller() -> None:
    """The fork server, which only waits for the agent by then, ends it."""
    with subprocess.Popen([IMPORTED, "-c", KILLED], stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        daemon = int(process.stdout.readline())
        [server] = children(process.pid)
        [agent] = agents(server)
        before = sockets(server)
        process.kill()
        process.wait(60)
        # It lets go of the launch's when it hears no more of its caller.
        wait_until(lambda: sockets(server) != before)
        os.kill(agent, signal.SIGKILL)
        wait_gone([server, agent, daemon])
    assert not launches.look_for_launches()  # a look, which removes the socket of an agent that was killed


def sockets(pid: int) -> int:
    found = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has closed that one just now
            found += os.readlink(fd).startswith("socket:")
    return found


def leave_behind(times: int) -> list[int]:
    """Starts processes in the background and leaves them, as ``os.system("command &")`` does; waits for their ends."""
    left = [int(subprocess.check_output("true > /dev/null & echo $!", shell=True)) for _ in range(times)]
    # A process that its parent has not reaped is still there.
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))
    waited_for = subprocess.run(["sh", "-c", "exit 3"], check=False)
    return [waited_for.returncode, os.getppid()]


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_what_a_rank_has_left_is_reaped_as_it_ends(start_method: str) -> None:
    """By the agent, which is its parent then; not what a rank waits for."""
    assert [status for status, _ in launcher(leave_behind, 2, start_method=start_method)(5)] == [3, 3]


def test_what_ranks_that_stay_have_left_is_reaped_and_a_ranks_own_end_is_told() -> None:
    def die() -> None:
        leave_behind(1)
        os.kill(os.getpid(), signal.SIGKILL)

    with Ranks(n_gpus=1) as ranks:
        (first,) = ranks.run(leave_behind, 1)
        assert ranks.run(leave_behind, 1) == [first]
        with pytest.raises(LaunchError, match="SIGKILL"):
            ranks.run(die)
