"""``mlaunch run`` on several machines, each a command of its own; and the files of its output."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests import launches
from tests.processes import agents, children, descendants, wait_gone
from tests.system.commands import MLAUNCH, environment, run, start, write
from tests.system.network import free_port

pytestmark = [pytest.mark.slow, pytest.mark.dear("each machine is a command of its own, with its own fork server")]
PORT = str(free_port())
MACHINES = ("--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", PORT)
TRAIN = """
import os, signal, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print([int(total), *(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE"))])
if dist.get_rank() == int(sys.argv[1]):
    raise ValueError("no such luck")
if int(sys.argv[1]) >= 0:
    signal.pause()
"""


def machines(folder: Path, *args: str, common: tuple[str, ...] = MACHINES) -> list[subprocess.Popen[str]]:
    return [start(folder, *common, "--node-rank", str(rank), *args) for rank in (0, 1)]


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, list[str], str]]:
    found = [process.communicate(timeout=90) for process in processes]
    return [
        (process.returncode, sorted(out.splitlines()), err)
        for process, (out, err) in zip(processes, found, strict=True)
    ]


def test_two_machines(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hush")
    first, second = ends(machines(tmp_path, "--token-file", "token", write(tmp_path, TRAIN), "-1"))
    assert (first[0], first[1]) == (0, ["[4, 0, 0, 0, 2]", "[4, 1, 1, 0, 2]"]), first[2]
    assert (second[0], second[1]) == (0, ["[4, 2, 0, 1, 2]", "[4, 3, 1, 1, 2]"]), second[2]


def test_a_failure_ends_both(tmp_path: Path) -> None:
    first, second = ends(machines(tmp_path, write(tmp_path, TRAIN), "3"))
    for status, _, err in (first, second):
        assert status == 1
        assert "mlaunch: rank 3 of train.py raised ValueError: no such luck" in err
        assert f'File "{tmp_path}/train.py", line' in err


def test_c10d_needs_no_node_rank(tmp_path: Path) -> None:
    common = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{PORT}")
    script = write(tmp_path, TRAIN)
    one = start(tmp_path, *common, script, "-1")
    other = start(tmp_path, *common, "--rdzv-conf", "is_host=0", script, "-1")
    assert [lines for _, lines, _ in ends([one, other])] == [["[2, 0, 0, 0, 1]"], ["[2, 1, 0, 1, 1]"]]


@pytest.mark.nightly
def test_machines_of_different_sizes_and_roles(tmp_path: Path) -> None:
    """Ranks are counted through all machines, and once more among those with the same role."""
    script = write(tmp_path, TRAIN + """
print([os.environ[name] for name in ("RANK", "WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")])
""")  # fmt: skip
    flags = ("--nnodes", "3", "--master-port", PORT, "--tee", "1", "--log-dir", "logs")
    processes = [
        start(tmp_path, *flags, "--node-rank", rank, "--nproc-per-node", size, "--role", role, script, "-1")
        for rank, size, role in (("0", "1", "a"), ("1", "2", "b"), ("2", "2", "a"))
    ]
    first, second, third = ends(processes)
    assert first[:2] == (0, ["[a0]:['0', '5', 'a', '0', '3']", "[a0]:[5, 0, 0, 0, 1]"]), first[2]
    assert second[:2] == (0, ["[b0]:['1', '5', 'b', '0', '2']", "[b0]:[5, 1, 0, 1, 2]",
                              "[b1]:['2', '5', 'b', '1', '2']", "[b1]:[5, 2, 1, 1, 2]"]), second[2]  # fmt: skip
    assert third[:2] == (0, ["[a0]:['3', '5', 'a', '1', '3']", "[a0]:[5, 3, 0, 2, 2]",
                             "[a1]:['4', '5', 'a', '2', '3']", "[a1]:[5, 4, 1, 2, 2]"]), third[2]  # fmt: skip


def test_a_failure_where_ranks_are_not_what_was_guessed(tmp_path: Path) -> None:
    """The second machine's own rank 1 is rank 2 of all: the report, its file and the status are of that rank."""
    script = write(tmp_path, TRAIN)
    flags = ("--nnodes", "2", "--master-port", PORT, "--redirects", "3", "--log-dir", "logs")
    one = start(tmp_path, *flags, "--node-rank", "0", script, "2")
    other = start(tmp_path, *flags, "--node-rank", "1", "--nproc-per-node", "2", script, "2")
    (_, _, first), (status, _, second) = ends([one, other])
    assert status == 1
    assert "mlaunch: rank 2 of train.py raised ValueError: no such luck" in first
    assert "mlaunch: rank 2 of train.py raised ValueError: no such luck" in second
    assert re.search(r"its output is in \S+/attempt_0/1\n", second)


def test_machines_that_do_not_fit(tmp_path: Path) -> None:
    common = ("--master-port", PORT, "--rdzv-conf", "join_timeout=30")
    script = write(tmp_path, TRAIN)
    one = start(tmp_path, *common, "--nnodes", "2", "--node-rank", "0", script, "-1")
    other = start(tmp_path, *common, "--nnodes", "3", "--node-rank", "1", script, "-1")
    for status, _, err in ends([one, other]):
        assert status == 1
        assert "mlaunch: train.py was not started: host " in err
        assert " has --nnodes 2" in err
        assert " has --nnodes 3" in err


def test_two_jobs_do_not_become_one(tmp_path: Path) -> None:
    script = write(tmp_path, TRAIN)
    one = start(tmp_path, *MACHINES, "--rdzv-id", "a", "--node-rank", "0", script, "-1")
    other = start(tmp_path, *MACHINES, "--rdzv-id", "b", "--node-rank", "1", script, "-1")
    for status, _, err in ends([one, other]):
        assert status == 1
        assert re.search(r"was not started: host \S+ has --rdzv-id [ab], host \S+ has --rdzv-id [ab]\n", err), err


def test_two_machines_on_one_host_are_told_to_say_which_they_are(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run(tmp_path, "--nnodes", "2", "--master-port", port, write(tmp_path, ""))
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert f"cannot be the master at --master-addr 127.0.0.1, --master-port {port}: Address already in use" in said
    advice = ". If several machines of this launch run on one host, give each its own --node-rank, from 0 to 1"
    assert said.endswith(advice)


def test_a_machine_that_does_not_say_which_it_is(tmp_path: Path) -> None:
    done = run(tmp_path, "--nnodes", "2", "--master-addr", "192.0.2.1", write(tmp_path, ""))
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert "the master at --master-addr 192.0.2.1, --master-port 29500: Cannot assign requested address" in said
    assert said.endswith("that machine is the first: give this one its own --node-rank, from 0 to 1")


def test_a_signal_that_ends_one_machine_is_named_on_the_other(tmp_path: Path) -> None:
    script = write(tmp_path, "import signal\nprint('runs', flush=True)\nsignal.pause()")
    first, second = machines(tmp_path, script)
    assert second.stdout is not None
    assert second.stdout.readline() == "runs\n"
    second.terminate()
    (_, _, told), (status, _, _) = ends([first, second])
    assert status == 143
    assert f"the call on host {socket.gethostname()} (ranks 2-3) of train.py was ended by SIGTERM" in told


def test_machines_that_do_not_come(tmp_path: Path) -> None:
    """It is no deadline that has passed: as where ranks cannot be started for another reason."""
    flags = ("--nnodes", "2", "--master-port", PORT, "--rdzv-conf", "join_timeout=0.5", "--deadline", "300")
    done = run(tmp_path, *flags, write(tmp_path, ""))
    assert done.returncode == 1
    assert "1 machine joined (" in done.stderr
    assert "); machine 1 of 2 missing; join_timeout=0.5 s has passed" in done.stderr
    done = run(tmp_path, *flags[:4], "--deadline", "0.5", "train.py")
    assert done.returncode == 124
    assert "its deadline of 0.5 s passed while the machines were joining" in done.stderr


def test_files_and_prefixes(tmp_path: Path) -> None:
    script = write(tmp_path, """
import os, sys
print("out of", os.environ["RANK"])
print("err of", os.environ["RANK"], file=sys.stderr)
os.system("printf 'child without an end'")
""")  # fmt: skip
    flags = ("--nproc-per-node", "2", "--log-dir", "logs", "--rdzv-id", "job", "--role", "trainer")
    done = run(tmp_path, *flags, "--tee", "0:3", "--redirects", "3", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[trainer0]:out of 0", "[trainer0]:child without an end"]
    assert done.stderr == "[trainer0]:err of 0\n"
    (folder,) = (tmp_path / "logs").iterdir()
    assert folder.name.startswith("job_")
    for rank in "01":
        assert (folder / "attempt_0" / rank / "stdout.log").read_text() == f"out of {rank}\nchild without an end"
        assert (folder / "attempt_0" / rank / "stderr.log").read_text() == f"err of {rank}\n"


def test_a_redirected_rank_has_its_traceback_in_its_file(tmp_path: Path) -> None:
    flags = ("--redirects", "2", "--log-dir", "logs")
    done = run(tmp_path, *flags, "--max-restarts", "1", write(tmp_path, "print(1); raise ValueError('x')"))
    assert (done.returncode, done.stdout) == (1, "1\n1\n")
    (folder,) = (tmp_path / "logs").iterdir()
    for attempt in "01":
        assert (folder / f"attempt_{attempt}" / "0" / "stderr.log").read_text().endswith("ValueError: x\n")
    assert f"\n  its output is in {folder}/attempt_1/0\n" in done.stderr


def test_an_interrupted_rank_says_so_in_its_file(tmp_path: Path) -> None:
    done = run(tmp_path, "--redirects", "2", "--log-dir", "logs", write(tmp_path, "raise KeyboardInterrupt"))
    assert done.returncode == 128 + signal.SIGINT
    (file,) = (tmp_path / "logs").rglob("stderr.log")
    assert file.read_text().endswith("KeyboardInterrupt\n")


def test_a_killed_rank_loses_nothing(tmp_path: Path) -> None:
    script = write(tmp_path, """
import os, sys
for number in range(20_000):
    print(number, "x" * 100)
os.kill(os.getpid(), 9)
""")  # fmt: skip
    done = run(tmp_path, "--tee", "1", "--log-dir", "logs", script)
    assert done.returncode == 137
    assert [line.split()[0] for line in done.stdout.splitlines()] == [f"[default0]:{n}" for n in range(20_000)]
    (file,) = (tmp_path / "logs").rglob("stdout.log")
    assert file.read_text().splitlines()[-1].startswith("19999 ")


def test_a_full_disk(tmp_path: Path) -> None:
    """A limit on the size of files stands for it; what is shown goes on."""
    script = write(tmp_path, "for _ in range(20): print('x' * 70_000, flush=True)\nprint('the end')")
    done = subprocess.run(
        [*MLAUNCH, "--tee", "1", "--log-dir", "logs", script],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[default0]:the end\n")
    assert re.fullmatch(
        r"mlaunch: /\S+/logs/\S+/attempt_0/0/stdout\.log cannot be written \(File too large\): "
        r"what this rank prints now is not kept there\n", done.stderr,
    )  # fmt: skip


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    done = run(tmp_path, "--log-dir", "logs", write(tmp_path, ""))
    assert (done.returncode, done.stderr) == (2, "mlaunch run: --log-dir logs: File exists\n")


def test_a_reader_that_leaves(tmp_path: Path) -> None:
    """As ``mlaunch run ... | head -1``: the training goes on."""
    script = write(tmp_path, "for i in range(30_000): print(i)\nopen('done.txt', 'w').write('all')")
    process = start(tmp_path, "--tee", "1", "--log-dir", "logs", script)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert (tmp_path / "done.txt").read_text() == "all"


def test_a_reader_that_has_left_before_the_plan_is_printed(tmp_path: Path) -> None:
    """As ``mlaunch run --dry-run ... | true``: the interpreter, which flushes last, has nothing to complain of."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [*MLAUNCH, "--dry-run", write(tmp_path, "")]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def start_waiting(cwd: Path) -> tuple[subprocess.Popen[str], int]:
    """A command whose rank waits for ever, and the reading end of a pipe that the rank keeps open."""
    os.mkfifo(cwd / "fifo")
    (cwd / "temporary").mkdir()
    script = write(cwd, "import os, signal\nos.open('fifo', os.O_WRONLY)\nprint('running')\nsignal.pause()")
    process = start(cwd, script, TMPDIR=str(cwd / "temporary"))
    return process, os.open(cwd / "fifo", os.O_RDONLY)


def kept_in(cwd: Path) -> list[str]:
    """The command's directories; torch's compiler makes one for good as it is imported."""
    return [name for name in os.listdir(cwd / "temporary") if name.startswith("mlaunch")]


def test_the_command_is_killed(tmp_path: Path) -> None:
    """Nothing of it stays, and no rank."""
    process, end = start_waiting(tmp_path)
    family = descendants(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_gone(family)
    assert kept_in(tmp_path) == []
    assert os.read(end, 1) == b""  # the rank's end of it is closed
    os.close(end)


def test_the_command_and_its_agent_are_killed(tmp_path: Path) -> None:
    """The fork server removes what neither of them can."""
    process, end = start_waiting(tmp_path)
    family = descendants(process.pid)
    [agent] = agents(children(process.pid)[0])
    os.kill(agent, signal.SIGSTOP)  # it cannot tidy up between the two
    process.send_signal(signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
    process.communicate()
    wait_gone(family)
    launches.look_for_launches()  # which removes the agent's socket, if it had one by then
    assert kept_in(tmp_path) == []
    os.close(end)


def test_the_agent_is_killed(tmp_path: Path) -> None:
    """Its directory goes with it, though it could not remove it."""
    process, end = start_waiting(tmp_path)
    assert len(kept_in(tmp_path)) == 1
    family = descendants(process.pid)
    [agent] = agents(children(process.pid)[0])
    os.kill(agent, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    wait_gone(family)
    assert "the agent was killed by SIGKILL" in err
    assert kept_in(tmp_path) == []
    os.close(end)
