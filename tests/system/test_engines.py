"""Launches on the machines of real engines: the same scenarios on each, which are those of a launch here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlaunch import LaunchError, launcher
from mlaunch.engines import Hosts
from tests import launches
from tests.processes import descendants, wait_gone
from tests.system.engine_rigs import (
    Rig,
    jobs,
    mpirun,
    ray,
    slurm_here,
    ssh,
    ssh_between,
    ssh_server,
    wait_for_jobs,
)
from tests.system.network import Namespaces, why_no_namespaces

pytestmark = [pytest.mark.slow, pytest.mark.dear("an engine's caller and its members are fresh interpreters")]
SIZES = {"ssh": 5}  # ranks in all; its second machine says that it has three
LIMIT = 60.0


@pytest.fixture(scope="module", params=["ssh", "slurm", "mpirun", "ray"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = {"ssh": ssh, "slurm": slurm_here, "mpirun": mpirun, "ray": ray}[request.param]
    with made(tmp_path_factory.mktemp(request.param)) as rig:
        yield rig


@pytest.fixture(scope="module")
def held(rig: Rig) -> Rig:
    assert len(rig.ask("hold")) == 2
    return rig


@pytest.fixture
def size(request: pytest.FixtureRequest) -> int:
    return SIZES.get(request.node.callspec.params["rig"], 4)


def lines(found: dict[str, Any], stream: str = "out") -> list[str]:
    return sorted(found[stream].splitlines())


@pytest.mark.nightly("ray")
def test_values_of_all_ranks_in_their_order(held: Rig, size: int) -> None:
    found = held.ask("values held")
    assert "value" in found, found["trace"]
    values, rows = found["value"]
    assert values == [[rank, sum(range(size)), 40, ""] for rank in range(size)]
    assert rows == [[rank, "returned"] for rank in range(size)]


@pytest.mark.nightly
def test_sixteen_ranks(held: Rig, request: pytest.FixtureRequest) -> None:
    ssh = request.node.callspec.params["rig"] == "ssh"
    many = 8 + SIZES["ssh"] - 2 if ssh else 16
    assert held.ask("many held")["value"] == [[rank, many] for rank in range(many)]


@pytest.mark.nightly
def test_output_of_ranks_comes_home(held: Rig, size: int) -> None:
    found = held.ask("printing held")
    assert lines(found) == [f"[{rank}] rank {rank} prints" for rank in range(size)]
    assert f"[0-{size - 1}] all of them" in found["err"] or found["err"].count("all of them") > 1


@pytest.mark.nightly("ray", "mpirun")
def test_the_exception_of_the_rank_that_failed_first(held: Rig, size: int) -> None:
    found = held.ask("raising held")
    assert (found["error"], found["text"]) == ("ValueError", "no such luck")
    assert f"rank {size - 1} of raising.<locals>.work() raised ValueError: no such luck" in found["report"]
    others = re.findall(r"^  (ranks? \d.*)$", found["report"], re.MULTILINE)
    assert others
    # Ranks on another machine may have seen that their peer has ended before they were stopped.
    call = r"in (barrier|a failed call of torch\.distributed) at engine_caller\.py:\d+"
    left = "running the function, before its first line or after its last|reporting an exception.*"
    place = rf"(was|were) ({call}|{left})"
    words = rf"ranks? [-\d, ]+ ({place}|raised RuntimeError: .*)"
    assert all(re.fullmatch(words, line) for line in others), found["report"]


@pytest.mark.nightly
def test_a_secret_is_where_nobody_looks(held: Rig, size: int) -> None:
    """It comes on standard input: command lines are open to all, variables and files to a batch system."""
    found = held.ask("secret held")
    assert found.get("value") == [[]] * size, found


@pytest.mark.nightly("ray", "mpirun")
def test_a_rank_that_is_killed(held: Rig) -> None:
    found = held.ask("killed held")
    assert found["error"] == "LaunchError"
    assert found["text"].startswith("rank 1 of killed.<locals>.work() was killed by SIGKILL\n  host "), found["text"]


@pytest.mark.nightly
def test_a_deadline(held: Rig) -> None:
    found = held.ask("late held")
    assert found["error"] == "LaunchTimeout"
    assert "did not finish within its deadline of 3 s" in found["text"]


@pytest.mark.nightly("ray", "mpirun")
def test_ctrl_c(held: Rig) -> None:
    found = held.ask("interrupted held")
    assert found["error"] == "KeyboardInterrupt"
    assert re.search(r"was interrupted; ranks 0-\d were in wait_for_ever at", found["notes"][0]), found["notes"]


@pytest.mark.nightly
def test_a_restart(held: Rig, size: int) -> None:
    found = held.ask("restarted held")
    assert found["value"] == ["1"] * size, found
    assert "is started again (restart 1 of at most 1)" in found["err"]


@pytest.mark.nightly
def test_large_arguments_and_values(held: Rig, size: int) -> None:
    assert held.ask("large held")["value"] == [True] * size


@pytest.mark.nightly
def test_ranks_that_stay(held: Rig, size: int) -> None:
    found = held.ask("staying held")
    assert "value" in found, found["trace"]
    assert found["value"] == [True, [[rank, rank] for rank in range(size)]]


@pytest.mark.nightly
def test_a_sweep(held: Rig, size: int) -> None:
    found = held.ask("sweeping held")
    assert "value" in found, found["trace"]
    values, places, sets = found["value"]
    assert all(one in ([x * 2] * 2, [x * (size - 2)] * (size - 2)) for x, one in enumerate(values, 1)), values
    assert places == ["0"] * 2 + ["1"] * (size - 2)
    assert sets == 2


@pytest.mark.nightly
def test_a_member_that_is_killed(held: Rig) -> None:
    """The next call gets other machines."""
    held.ask("close")
    found = held.ask("member_killed")
    assert found["error"] == "LaunchError"
    assert re.match(r"host \S+ of member_killed.<locals>.work\(\) was lost", found["text"]), found["text"]


@pytest.mark.nightly
@pytest.mark.parametrize("rig", ["slurm"], indirect=True)
def test_a_queue(rig: Rig) -> None:
    """Ctrl-C and SIGKILL while the job waits, and a partition that there is not."""
    rig.ask("hold")
    found = rig.ask("queued")
    assert (found["error"], found.get("value")) == ("KeyboardInterrupt", None)
    assert len(jobs(rig).splitlines()) == 1
    other = Rig(rig.engine, rig.environ)
    other.say("waiting")
    assert other.hear() == {"waits": True}
    other.kill()
    other.close()
    wait_for_jobs(rig, 1)
    found = rig.ask("nowhere")
    assert found["text"].startswith("Slurm gives no allocation:\n  sbatch: error: invalid partition specified: nope")
    rig.ask("close")
    wait_for_jobs(rig, 0)
    assert rig.ask("inside")["value"] == [[0, 1, 2, 3], True]
    wait_for_jobs(rig, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("rig", ["slurm"], indirect=True)
def test_a_job_that_begins_after_its_caller_fell_silent(rig: Rig) -> None:
    """No member has brought the timeout there; the job has it from its beginning."""
    rig.ask("hold")
    other = Rig(rig.engine, rig.environ)
    other.say("waiting")
    assert other.hear() == {"waits": True}
    other.process.send_signal(signal.SIGSTOP)
    rig.ask("close")
    wait_for_jobs(rig, 0)
    other.kill()
    other.close()


@pytest.mark.nightly
@pytest.mark.parametrize("rig", ["slurm"], indirect=True)
def test_a_job_whose_guard_was_killed(rig: Rig) -> None:
    rig.ask("hold")
    [guard] = [pid for pid in descendants(rig.process.pid) if b"sbatch" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(guard, signal.SIGKILL)
    rig.ask("close")
    wait_for_jobs(rig, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("rig", ["slurm"], indirect=True)
def test_a_controller_that_is_away_when_a_job_is_given_back(rig: Rig, tmp_path: Path) -> None:
    """Slurm's commands wait for it for two seconds in place of ten, and ``close()`` for them."""
    usual = Path(rig.environ["SLURM_CONF"])
    (tmp_path / "slurm.conf").write_text(f"{usual.read_text()}MessageTimeout=2\n")
    caller = Rig(rig.engine, {**rig.environ, "SLURM_CONF": str(tmp_path / "slurm.conf"), "SCENE_END_TIMEOUT": "1"})
    caller.ask("hold")
    controller = int((usual.parent / "slurmctld.pid").read_text())
    os.kill(controller, signal.SIGSTOP)
    try:
        caller.ask("close")
    finally:
        os.kill(controller, signal.SIGCONT)
    wait_for_jobs(rig, 0)
    assert caller.ask("hold")
    caller.ask("close")
    caller.close()
    wait_for_jobs(rig, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("rig", ["slurm"], indirect=True)
@pytest.mark.parametrize("cause", ["PREEMPTED", "TIMEOUT"])
def test_slurm_ends_the_job(rig: Rig, cause: str) -> None:
    """For one with a higher priority, or as its time is over; Slurm looks every half minute whether it is.

    It signals ranks, too, and one of them may be the first of whose end is heard.
    """
    rig.ask("hold")
    rig.say("cut held")
    assert rig.hear() == {"runs": True}
    job = jobs(rig).split()[0]
    ends = {
        "PREEMPTED": ["salloc", "--partition=urgent", "--nodes=2", "--exclusive", "true"],
        "TIMEOUT": ["scontrol", "update", f"JobId={job}", "EndTime=now"],
    }
    subprocess.run(ends[cause], env=rig.environ, capture_output=True, check=True)
    found = rig.hear()
    assert found["error"] == "LaunchError"
    assert re.match(r"(host \S+|rank \d) of cut.<locals>.work\(\) was (lost: |killed by SIGTERM\n)", found["text"])
    assert f"was lost: {cause} (job {job}, node n" in found["text"]
    rig.ask("close")
    wait_for_jobs(rig, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("rig", ["slurm"], indirect=True)
def test_a_call_that_slurm_preempts_starts_anew(rig: Rig) -> None:
    """For a job of a higher priority: its call waits in the queue until that is over."""
    rig.say("preempted")
    assert rig.hear() == {"runs": True}
    urgent = ["salloc", "--partition=urgent", "--nodes=2", "--exclusive", "true"]
    subprocess.run(urgent, env=rig.environ, capture_output=True, check=True)
    found = rig.hear()
    assert found.get("value") == ["done"] * 4, found
    wait_for_jobs(rig, 0)


@pytest.mark.nightly
def test_a_caller_that_falls_silent_leaves_nothing(rig: Rig) -> None:
    """As one whose machine has lost its power: nothing tells of its end."""
    rig.say("unheard")
    pids = rig.hear()["pids"]
    rig.process.send_signal(signal.SIGSTOP)
    wait_gone(pids, LIMIT)
    if "Slurm" in rig.engine:
        wait_for_jobs(rig, 0)
    rig.process.send_signal(signal.SIGCONT)
    found = rig.hear()
    assert re.search(r"host \S+ of \S+work\(\) was lost", found["text"]), found
    assert "Ray" in rig.engine or "nothing has come from the caller for 4 s, so this machine leaves" in found["text"]


@pytest.mark.nightly("ray", "mpirun", "slurm")
def test_a_caller_that_is_killed_leaves_nothing(rig: Rig) -> None:
    rig.ask("close")  # what other tests hold would be all that there is
    rig.say("processes")
    pids = rig.hear()["pids"]
    rig.kill()
    wait_gone(pids, LIMIT)
    if "Slurm" in rig.engine:
        wait_for_jobs(rig, 0)
    # Which removes the name of its socket; so does the next call on machines. Other launches may run here.
    assert not [one for one in launches.ask("status") if rig.process.pid in (one["caller"], one["agent"])]


@pytest.mark.nightly
def test_hosts_with_networks_of_their_own(tmp_path: Path) -> None:
    """Their names stand before what they print, and the one whose cable is pulled is named.

    From here that one is reached through the other alone (``ProxyJump``).
    """
    if why := why_no_namespaces():
        pytest.skip(why)
    network = Namespaces(3)
    try:
        network.rule(2, "input", "ip saddr 10.77.0.1 drop")
        with ssh_between(network.hosts, tmp_path) as rig:
            assert rig.ask("hold") == ["h2", "h3"]
            found = rig.ask("printing held")
            assert {"[h2:0] rank 0 prints", "[h3:3] rank 3 prints"} <= set(found["out"].splitlines()), found
            rig.say("cut held")
            assert rig.hear() == {"runs": True}
            network.cable(2, "down")
            found = rig.hear()
            assert found["error"] == "LaunchError"
            assert "host h3" in found["text"].splitlines()[0], found["text"]
            network.cable(2, "up")
            rig.ask("close")
    finally:
        network.close()


@pytest.mark.nightly
@pytest.mark.parametrize("wrong", ["key of this user", "key of the host", "name"])
def test_a_host_that_does_not_let_us_in(tmp_path: Path, wrong: str) -> None:
    """Nobody is asked for a password, and the host is named with ssh's words."""
    words = {
        "key of this user": r"root@127\.0\.0\.1: Permission denied \(.*\)\.",
        "key of the host": r"Host key verification failed\.",
        "name": r"ssh: Could not resolve hostname c\.invalid: .*",
    }
    with ssh_server(tmp_path):
        if wrong == "key of this user":
            (tmp_path / "authorized").write_text("")
        if wrong == "key of the host":
            known, user = tmp_path / "known", (tmp_path / "user.pub").read_text().split()
            known.write_text(known.read_text().replace(known.read_text().split()[2], user[1]))
        name = "c.invalid" if wrong == "name" else "a"
        engine = Hosts([name], ssh=["ssh", "-T", "-F", str(tmp_path / "ssh.conf")])
        with pytest.raises(LaunchError) as caught:
            launcher(os.getpid, 1, engine=engine)()
    first, *others, advice = str(caught.value).splitlines()
    assert first == f"mlaunch did not start on machine 0: ssh to {name} exited with code 255"
    assert any(re.fullmatch(f"  {words[wrong]}", line) for line in others), others
    assert advice == f"ssh must reach {name} without a question: try `ssh -o BatchMode=yes {name} true` here"
