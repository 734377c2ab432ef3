"""Calls on machines of an engine that a third party could have written: its machines are threads of this process."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import mlaunch
from mlaunch import LaunchError, LaunchTimeout, Ranks, launcher
from mlaunch.caller.running_launches import ask
from mlaunch.cli import main
from mlaunch.engines import Command, Ends, Engine, Hosts, Placement, Ray, Slurm
from mlaunch.engines.caller import machines
from mlaunch.engines.caller.machines import Machine
from mlaunch.engines.caller.merged_agent import MergedAgent
from mlaunch.engines.member import member
from mlaunch.engines.member.machine_launch import MachineLaunch, SignalsHere
from mlaunch.engines.member.member import MachinePlan
from mlaunch.engines.wire import MARK, MachineDone, Start
from mlaunch.engines.wire.frame_stream import FrameStream
from mlaunch.insight.wire import STACKS
from mlaunch.protocol import registry, settings
from mlaunch.protocol.messages import AgentStarted, Finished
from mlaunch.protocol.registry import STATUS
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.run.command import run_on_engine
from tests import builds, launches
from tests.processes import children, said_in_fork, wait_until
from tests.system.engine_caller import parent

LIMIT = 60.0


class Threads(Engine):
    """Serves each machine in a thread. ``states``: what it says before they are there."""

    def __init__(self, serve: Callable[[FrameStream, str], None] = member.serve, states: Sequence[str] = ()) -> None:
        super().__init__("python-over-there")
        self.serve, self.states, self.placements = serve, states, list[Placed]()

    def place(self, machines: int | None, command: Sequence[str]) -> Placement:
        assert (command[0], command[-1]) == ("python-over-there", "mlaunch.engines.member.main")
        self.placements.append(Placed(self, machines or 2))
        return self.placements[-1]


class Placed(Placement):
    def __init__(self, engine: Threads, machines: int) -> None:
        self.sizes = [None] * (machines - 1) + [1]
        self._engine, self._states, self.threads = engine, list(engine.states), list[threading.Thread]()

    def state(self) -> str:
        return self._states.pop(0) if self._states else ""

    def start(self, machine: int) -> Ends:
        ours, theirs = socket.socketpair()
        stream = FrameStream(os.dup(theirs.fileno()), theirs.detach())
        thread = threading.Thread(target=self._serve, args=(stream, f"m{machine}"), daemon=True)
        self.threads.append(thread)
        thread.start()
        return Ends(os.dup(ours.fileno()), ours.detach())

    def _serve(self, stream: FrameStream, host: str) -> None:
        with contextlib.closing(stream):
            self._engine.serve(stream, host)

    def fate(self, machine: int) -> str:
        return f"POWER_CUT on m{machine}"

    def cancel(self) -> None:
        for thread in self.threads:
            thread.join(LIMIT)


@pytest.fixture
def engine() -> Iterator[Threads]:
    made = Threads()
    yield made
    assert made.placements
    for placed in made.placements:
        for thread in placed.threads:
            thread.join(LIMIT)
    assert not [thread for placed in made.placements for thread in placed.threads if thread.is_alive()]


def rank() -> int:
    return dist.get_rank()


def test_values_output_and_report(engine: Threads, capfd: pytest.CaptureFixture[str]) -> None:
    """The second machine says that it has one rank."""

    def work(tensor: torch.Tensor) -> torch.Tensor:
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}")
        print("everybody")
        return tensor + dist.get_rank()

    call = launcher(work, 2, engine=engine)
    assert [value.tolist() for value in call(torch.ones(2))] == [[1, 1], [2, 2], [3, 3]]
    lines = capfd.readouterr().out.splitlines()
    assert {"[m0:0] rank 0 of 3", "[m0:1] rank 1 of 3", "[m1:2] rank 2 of 3"} <= set(lines)
    assert {"".join(re.findall(r"m\d:", line)) for line in lines if "everybody" in line} <= {"m0:m1:", "m0:", "m1:"}
    report = call.last
    assert report is not None
    assert [(row.rank, row.host, row.end) for row in report.ranks] == [
        (0, "m0", "returned"), (1, "m0", "returned"), (2, "m1", "returned"),
    ]  # fmt: skip
    assert report.title.startswith("test_values_output_and_report.<locals>.work()  3 ranks on m0, m1, ")
    assert "host" in str(report).splitlines()[1]


def test_settings_of_the_caller_travel_less_those_of_its_machine(engine: Threads) -> None:
    def told() -> dict[str, object]:
        return dict(settings.of_this_process())

    before, affinity = os.umask(0o027), os.sched_getaffinity(0)
    try:
        torch.set_default_dtype(torch.float64)
        os.sched_setaffinity(0, {min(affinity)})
        found = launcher(told, 1, engine=engine)()
    finally:
        os.umask(before)
        torch.set_default_dtype(torch.float32)
        os.sched_setaffinity(0, affinity)
    assert [(one["umask"], one["dtype"], one["affinity"]) for one in found] == [
        (0o027, "float64", tuple(sorted(affinity)))
    ] * 2


@contextlib.contextmanager
def reader_that_begins_late(monkeypatch: pytest.MonkeyPatch) -> Iterator[bytearray]:
    """Gives what is printed, of which nothing is read until the machines have said their last word."""
    said, tell, found = threading.Event(), MergedAgent._tell, bytearray()

    def note(merged: MergedAgent, record: object, *beside: Any) -> None:
        tell(merged, record, *beside)
        if isinstance(record, Finished):
            said.set()

    def read(end: int) -> None:
        said.wait(LIMIT)
        while data := os.read(end, 1 << 16):
            found.extend(data)

    monkeypatch.setattr(MergedAgent, "_tell", note)
    reader, writer = os.pipe()
    thread = threading.Thread(target=read, args=(reader,), daemon=True)
    thread.start()
    with open(writer, "w") as file, contextlib.redirect_stdout(file):
        yield found
    thread.join(LIMIT)
    os.close(reader)


@pytest.mark.parametrize("end", ["returns", "raises"])
def test_all_that_ranks_print_last_is_shown(engine: Threads, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """However their launch ends, and though it waits for nobody who does not read any more."""

    def work() -> None:
        sys.stdout.write("xy"[dist.get_rank()] * (1 << 21) + f"\nlast line of rank {dist.get_rank()}\n")
        sys.stdout.flush()
        dist.barrier()
        if end == "raises" and dist.get_rank() == 0:
            raise ValueError("at its end")

    raised = pytest.raises(ValueError, match="at its end") if end == "raises" else contextlib.nullcontext()
    with reader_that_begins_late(monkeypatch) as found, raised:
        launcher(work, 1, engine=engine, output="all")()
    assert [found.count(letter) for letter in (b"x", b"y")] == [1 << 21] * 2
    assert found.count(b"last line of rank") == 2


def test_all_that_ranks_print_last_is_kept(engine: Threads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def work() -> None:
        sys.stdout.write("x" * (1 << 20) + "\n")

    with reader_that_begins_late(monkeypatch):
        launcher(work, 1, engine=engine, log_dir=tmp_path)()
    kept = [file.stat().st_size for file in tmp_path.rglob("stdout.log")]
    assert kept == [(1 << 20) + 1] * 2


@pytest.mark.slow
def test_machines_that_say_no_last_word_are_given_back(engine: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is to end waits for it, but not for ever."""
    send, mute, cancelled = FrameStream.send, list[FrameStream](), list[Placed]()

    def send_but_this(stream: FrameStream, record: object, *beside: Any) -> None:
        if isinstance(record, MachineDone):
            mute.append(stream)
        else:
            send(stream, record, *beside)

    def cancel(placed: Placed) -> None:
        cancelled.append(placed)
        for stream in mute:
            with socket.socket(fileno=os.dup(stream.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)

    monkeypatch.setattr(FrameStream, "send", send_but_this)
    launches.become_impatient(monkeypatch)
    monkeypatch.setattr(Placed, "cancel", cancel)
    with engine.hold(2) as held:
        with pytest.raises(LaunchTimeout):
            launcher(signal.pause, engine=held, deadline=0.1, grace_period=0.1)()
        assert cancelled == engine.placements


def seen(word: bytes, state: str) -> dict[str, Any]:
    """Asks until all ranks of the caller's launch are in this state."""
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        for launch in ask(word):
            if len(launch["ranks"]) == 3 and all(rank["state"] == state for rank in launch["ranks"]):
                return launch
    raise TimeoutError(f"seen: {ask(word)}")


def test_a_launch_is_looked_at_from_here(engine: Threads, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``mlaunch ps`` and ``stacks`` find it where it was called, with all machines' ranks; so does who hears events."""
    events: list[dict[str, Any]] = []

    def work(go: Path) -> int:
        wait_until(go.exists)
        return os.getpid()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(launcher(work, 2, engine=engine, events=events.append), tmp_path / "go")
        try:
            launch = seen(STATUS, "running the function")
            assert main(["ps"]) == 0
            shown = capsys.readouterr().out
            stacks = seen(STACKS, "running the function")
        finally:
            (tmp_path / "go").touch()
        assert [rank["pid"] for rank in launch["ranks"]] == running.result(LIMIT)
    assert [rank["host"] for rank in launch["ranks"]] == ["m0", "m0", "m1"]
    assert launch["caller"] == os.getpid()
    assert "cpu on m1  running the function" in shown
    assert all(any("work" in name for _, _, name in rank["frames"]) for rank in stacks["ranks"])
    assert not [one for one in ask(STATUS) if one["id"] == launch["id"]]
    assert {event["launch"] for event in events} == {launch["id"]}
    assert [event["event"] for event in events if event["event"] != "rank"] == ["launch", "end"]
    told = sorted((event["rank"], event["host"], event["pid"]) for event in events if event["event"] == "rank")
    assert told == sorted((rank["rank"], rank["host"], rank["pid"]) for rank in launch["ranks"] * 2)  # start and end


def test_stop_ends_the_ranks_of_all_machines() -> None:
    """Also those of a machine whose agent does not listen yet."""

    def stop() -> int:
        ours = list[str]()
        wait_until(lambda: bool(ours.extend(one["id"] for one in ask(STATUS) if one["agent"] == os.getpid()) or ours))
        return main(["stop", *ours])

    def wait() -> None:
        while True:
            signal.pause()

    engine = Threads()
    with ThreadPoolExecutor(1) as thread:
        stopped = thread.submit(stop)
        with pytest.raises(LaunchError, match=rf"was ended by mlaunch stop \(pid {os.getpid()}\)"):
            launcher(wait, 1, engine=engine, machines=2, device_type="cpu", max_restarts=2)()
        assert stopped.result(LIMIT) == 0
    assert len(engine.placements) == 1


def test_an_agent_that_is_killed_over_there_leaves_no_name(engine: Threads) -> None:
    def work() -> None:
        dist.barrier()
        if dist.get_rank() == 2:
            os.kill(os.getppid(), signal.SIGKILL)
        threading.Event().wait()

    with pytest.raises(LaunchError, match=r"^the agent on host m1 of \S+work\(\) was killed by SIGKILL\n"):
        launcher(work, 2, engine=engine, grace_period=0.1)()
    for placed in engine.placements:
        placed.cancel()
    assert not list(registry.home(os.environ).iterdir())


def test_an_agent_that_is_killed_while_others_join_ends_the_call(
    engine: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: nobody waits for its machine."""
    take = MachineLaunch._take

    def take_and_kill(launch: MachineLaunch, record: object, fds: Sequence[int]) -> None:
        if isinstance(record, AgentStarted) and launch._spec.rank_start > 0:
            signal.pidfd_send_signal(fds[0], signal.SIGKILL)
        take(launch, record, fds)

    monkeypatch.setattr(MachineLaunch, "_take", take_and_kill)
    with pytest.raises(LaunchError, match=r"^the agent on host m1 of rank\(\) was killed by SIGKILL\n"):
        launcher(rank, 2, engine=engine, grace_period=0.1)()


def test_files_of_a_killed_caller_are_removed_by_the_next_call(engine: Threads) -> None:
    left = registry.home(os.environ) / "0123456789ab.sock"
    left.parent.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as nobody:
        nobody.bind(str(left))
    assert launcher(rank, 1, engine=engine, machines=1)() == [0]
    assert not left.exists()


def test_so_many_start_at_once(engine: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    starting, most, lock = 0, 0, threading.Lock()

    def serve(stream: FrameStream, host: str) -> None:
        nonlocal starting
        with lock:
            starting -= 1
        member.serve(stream, host)

    def start(placed: Placed, machine: int) -> Ends:
        nonlocal starting, most
        with lock:
            starting += 1
            most = max(most, starting)
        return usual(placed, machine)

    usual, engine.serve = Placed.start, serve
    monkeypatch.setattr(Placed, "at_once", 2)
    monkeypatch.setattr(Placed, "start", start)
    with engine.hold(7, 1) as cluster:
        assert cluster.hosts == [f"m{number}" for number in range(7)]
    assert most <= 2


def test_the_first_failure_of_all_machines(engine: Threads) -> None:
    def work() -> None:
        dist.barrier()
        if dist.get_rank() == 2:
            raise ValueError("no such luck")
        dist.barrier()

    with pytest.raises(ValueError, match="no such luck") as caught:
        launcher(work, 2, engine=engine)()
    report = str(caught.value.__cause__)
    assert report.startswith(
        "rank 2 of test_the_first_failure_of_all_machines.<locals>.work() raised ValueError: no such"
    )
    # A rank on the other machine may have seen that its peer has ended before it was stopped.
    assert re.search(r"\n  ranks? 0.* (was|were|raised RuntimeError:) ", report)


def test_a_death_is_on_its_machine(engine: Threads) -> None:
    def work() -> None:
        if dist.get_rank() == 2:
            os._exit(3)
        dist.barrier()

    with pytest.raises(LaunchError, match=r"rank 2 of .* exited with code 3.*\n  host m1, cpu, pid"):
        launcher(work, 2, engine=engine)()


@pytest.mark.slow
def test_a_gate_that_is_stopped_is_named_and_not_what_ranks_raise_for_it(engine: Threads) -> None:
    """Their requests to the store end with the link's connection, which somebody has caused."""

    def work() -> None:
        if dist.get_rank() == 0:
            [gate] = [pid for pid in children(os.getppid()) if "gate" in Path(f"/proc/{pid}/comm").read_text()]
            os.kill(gate, signal.SIGSTOP)
        dist.distributed_c10d._get_default_store().get("nobody sets it")

    with pytest.raises(LaunchError) as caught:
        launcher(work, 2, engine=engine, heartbeat_timeout=2, grace_period=0.5)()
    assert re.match(r"the master at \S+, port \d+, .*was lost: no heartbeat came for 2 s", str(caught.value))
    assert "was a process there stopped (SIGSTOP)?" in str(caught.value)


@pytest.mark.slow
def test_a_deadline(engine: Threads) -> None:
    for deadline in (0.3, 3.0, 30.0):
        with pytest.raises(LaunchTimeout) as caught:
            launcher(lambda: threading.Event().wait(), 2, engine=engine, deadline=deadline, grace_period=0.1)()
        if "were joining" not in str(caught.value):  # machines or ranks, as it may pass on a busy machine
            break
    assert "ranks 0-2 had not returned" in str(caught.value)


@pytest.mark.slow
def test_a_machine_that_cannot_start(engine: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent, say; it goes on serving."""
    started = MachineLaunch.__init__

    def fail(*_: Any) -> None:
        monkeypatch.setattr(MachineLaunch, "__init__", started)
        raise OSError(24, "Too many open files")

    with engine.hold(2) as held:
        monkeypatch.setattr(MachineLaunch, "__init__", fail)
        with pytest.raises(LaunchError, match=r"host m\d: OSError: \[Errno 24\] Too many open files"):
            launcher(rank, engine=held)()
        assert launcher(rank, engine=held)() == [0, 1, 2]


def test_machines_that_are_held(engine: Threads) -> None:
    with engine.hold(2, n_gpus=1) as held:
        assert (held.hosts, repr(held)) == (["m0", "m1"], "<2 machines: m0, m1>")
        assert launcher(rank, engine=held)() == [0, 1]
        with pytest.raises(ValueError, match=r"machines=3 on 2 held machines: allowed: 2, or None"):
            launcher(rank, engine=held, machines=3)()
        with pytest.raises(TypeError, match="cannot be pickled"):
            launcher(print, engine=held)(threading.Lock())
        with pytest.raises(LaunchError, match=r"host m\d cannot take part: ValueError: devices="):
            launcher(rank, engine=held, devices=[7])()
        assert launcher(rank, engine=held)() == [0, 1]
    assert len(engine.placements) == 1
    assert repr(held) == "<no machines any more>"
    with pytest.raises(LaunchError, match=r"was given back \(close\(\) was called\); hold\(\) another one"):
        launcher(rank, engine=held)()


@pytest.mark.parametrize("failing", ["cancel", "close"])
def test_an_interrupt_while_machines_are_given_back_loses_none(
    engine: Threads, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """They are given back by the next attempt, be that of a close() or of a call."""
    kind = {"cancel": Placed, "close": Machine}[failing]
    original, interrupted = getattr(kind, failing), list[object]()

    def interrupt(*args: Any) -> None:
        if not interrupted:
            interrupted.append(args)
            raise KeyboardInterrupt
        original(*args)

    held = engine.hold(2)
    with monkeypatch.context() as patch:
        patch.setattr(kind, failing, interrupt)
        with pytest.raises(KeyboardInterrupt):
            held.close()
        assert (
            any(thread.is_alive() for placed in engine.placements for thread in placed.threads) or failing == "cancel"
        )
        held.close()
    assert held.hosts == []


def test_a_fork_of_the_caller_does_not_keep_machines(engine: Threads) -> None:
    with engine.hold(1):
        fork = os.fork()
        if fork == 0:
            while True:
                signal.pause()
    try:
        assert not engine.placements[0].threads[0].is_alive()
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)


def test_held_machines_in_a_fork(engine: Threads) -> None:
    """Which was made while another thread was calling, whose lock nobody gives back there."""
    with engine.hold(1, 1) as held:

        def run() -> str:
            held.close()
            with pytest.raises(LaunchError) as caught:
                launcher(rank, engine=held)()
            return str(caught.value)

        with held._lock:
            said = said_in_fork(run)
    assert said.startswith(f"these machines belong to process {os.getpid()}, of which this one (pid ")


@pytest.mark.slow
def test_machines_that_share_a_name_alone(engine: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not one for that, and do not meet on loopback."""
    names, found, spec = iter("abcdef"), set[str](), MachinePlan.spec

    def note(plan: MachinePlan, order: Start) -> LaunchSpec:
        found.add(order.master_ip)
        return spec(plan, order)

    monkeypatch.setattr(MachinePlan, "spec", note)
    with engine.hold(2, 1) as held:
        assert launcher(rank, engine=held)() == [0, 1]
        assert found == {"127.0.0.1"}
        monkeypatch.setattr("mlaunch.engines.member.member.identity", lambda: next(names))
        monkeypatch.setattr("mlaunch.engines.member.member.addresses", lambda: ["127.0.0.2"])
        assert launcher(rank, engine=held)() == [0, 1]
    assert found == {"127.0.0.1", "127.0.0.2"}


def test_machines_meet_at_an_address_that_all_reach(engine: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was tried is said where there is none."""
    names, broadcast = map(str, itertools.count()), "255.255.255.255"
    monkeypatch.setattr("mlaunch.engines.member.member.identity", lambda: next(names))
    offered = [broadcast, "127.0.0.2"]
    monkeypatch.setattr("mlaunch.engines.member.member.addresses", lambda: offered)
    assert launcher(rank, 1, engine=engine)() == [0, 1]
    offered.pop()
    words = rf"host m1 does not reach host m0 at port \d+: tried {broadcast} \([A-Z]\w+ .*\); is there a firewall"
    with pytest.raises(LaunchError, match=words):
        launcher(rank, 1, engine=engine)()


def test_machines_that_nobody_uses_are_given_back(engine: Threads) -> None:
    held = engine.hold(1, idle_timeout=0.05)
    for thread in engine.placements[0].threads:
        thread.join(LIMIT)
    with pytest.raises(LaunchError, match=r"no call came for 0.05 s"):
        launcher(rank, engine=held)()


@pytest.mark.slow
def test_the_wait_for_machines_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    engine = Threads(states=["queued (Priority)", "queued (Priority)", "queued (Resources)"])
    assert launcher(rank, 1, engine=engine, machines=1)() == [0]
    assert capfd.readouterr().err.splitlines()[:2] == [
        "mlaunch: rank() waits: queued (Priority)",
        "mlaunch: rank() waits: queued (Resources)",
    ]
    assert launcher(rank, 1, engine=engine, machines=1, progress=False)() == [0]
    assert builds.without_gloo(capfd.readouterr().err) == ""


TASK = {"SLURM_PROCID": "3", "SLURM_STEP_ID": "4", "PMIX_RANK": "1", "OMPI_COMM_WORLD_RANK": "2", "PMI_SIZE": "5"}


@pytest.mark.slow
def test_ranks_do_not_take_themselves_for_the_task_that_has_started_their_member() -> None:
    """What says whose job it is stays."""
    words = " ".join(f"{name}={value}" for name, value in {**TASK, "SLURM_JOB_ID": "77"}.items())
    engine = Hosts(["a"], ssh=["sh", "-c", f'{words} exec sh -c "$2"', "sh"])

    def seen() -> list[str]:
        return sorted({*TASK, "SLURM_JOB_ID"} & os.environ.keys())

    assert launcher(seen, 1, engine=engine, device_type="cpu")() == [["SLURM_JOB_ID"]]


@pytest.mark.dear("members have fork servers of their own")
@pytest.mark.nightly("*exit-*")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ssh", "words"),
    [('sh -c "$2"; exit', r"is it cut off, or was its member stopped\? kill -CONT \d+ there continues that"),
     ('exec sh -c "$2"', r"ssh to b \(pid (\d+)\) is stopped; kill -CONT \1 continues it")],
)  # fmt: skip
def test_a_machine_that_does_not_answer_is_told_of(
    ssh: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its member was stopped, or the program through which it is reached; its ranks go on, and nobody hears of them."""
    os.mkfifo(tmp_path / "told")
    engine = Hosts(["a", "b"], ssh=["sh", "-c", ssh, "sh"])
    engine.heartbeat_timeout = 4.0

    def work() -> int:
        if dist.get_rank() == 1:
            member = os.getppid()
            for _ in range(2):  # of the agent, and of the fork server
                member = int(Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(member, signal.SIGSTOP)
            (tmp_path / "told").read_text()
            os.kill(member, signal.SIGCONT)
        dist.barrier()
        return dist.get_rank()

    said = ""

    def is_told() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return re.search(rf"work\(\): host \S+ has not answered for 2 s: {words}", said) is not None

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(launcher(work, 1, engine=engine, machines=2, device_type="cpu"))
        wait_until(is_told)
        (tmp_path / "told").write_text("")
        assert call.result(LIMIT) == [0, 1]


def hello(**changes: Any) -> Callable[[FrameStream, str], None]:
    """A member of another kind."""

    def serve(stream: FrameStream, host: str) -> None:
        ours = {"mlaunch": mlaunch.__version__, "Python": "3.1.4", "torch": "", "host": host, "pid": 1}
        with contextlib.suppress(BrokenPipeError):  # the caller has heard enough of the other one
            os.write(stream.outgoing, MARK + json.dumps({**ours, **changes}).encode() + b"\n")

    return serve


def test_a_member_that_cannot_serve() -> None:
    for serve, words in (
        (hello(mlaunch="0.0.1"), r"host m\d has mlaunch 0\.0\.1, and this process has mlaunch 0\.1\.0"),
        (hello(), r"host m\d has Python 3\.1\.4, and this process has Python 3\.\d+\.\d+"),
        (
            hello(Python=platform.python_version(), torch="1.13.1+cu117"),
            r"host m\d has torch 1\.13\.1\+cu117, and this process has torch \d+\.",
        ),
        (lambda _stream, _host: None, r"mlaunch did not start on machine \d: POWER_CUT on m\d"),
    ):
        with pytest.raises(LaunchError, match=words):
            launcher(rank, 1, engine=Threads(serve))()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("kill -STOP $$", r"sh \(pid (\d+)\) is stopped, and has started 0 of 2 processes; kill -CONT \1 continues it"),
        ('exec "$0" "$@"', "sh has started 1 of 2 processes"),
    ],
)
def test_a_program_that_does_not_start_all(command: str, words: str) -> None:
    """As mpirun that somebody has stopped, or one of whose processes was. No queue explains it."""
    engine = Command(["sh", "-c", command], python=sys.executable)
    with pytest.raises(LaunchTimeout, match=rf"^the machines have not come within join_timeout=0.3 s: {words}\. Is"):
        launcher(rank, 1, engine=engine, machines=2, join_timeout=0.3)()


def test_a_member_that_is_killed_behind_ssh() -> None:
    """ssh says no word of that, and exits as if it had not reached the host."""
    words = r"^mlaunch did not start on machine 0: ssh to a exited with code 255\nmlaunch was probably killed on a, "
    with pytest.raises(LaunchError, match=words):
        launcher(rank, 1, engine=Hosts(["a"], ssh=["sh", "-c", "exit 255"]))()


def test_a_machine_without_mlaunch(tmp_path: Path) -> None:
    """An interpreter that finds no packages, behind what stands for ssh."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o700)
    there = Hosts(["a"], ssh=["sh", "-c", 'exec sh -c "$2"', "sh"], python=str(bare), cwd=str(tmp_path))
    with pytest.raises(LaunchError, match=r"No module named 'mlaunch'") as caught:
        launcher(rank, 1, engine=there)()
    assert str(caught.value).startswith("mlaunch did not start on machine 0: ssh to a exited with code 1\n")
    assert str(caught.value).endswith(f"must be installed there: {bare} -m pip install mlaunch=={mlaunch.__version__}")
    with pytest.raises(LaunchError, match="no-such-ssh cannot be run here: No such file or directory; install it"):
        launcher(rank, 1, engine=Hosts(["a"], ssh=["no-such-ssh"]))()


def test_a_member_that_says_nothing() -> None:
    def serve(stream: FrameStream, _host: str) -> None:
        os.set_blocking(stream.incoming, True)
        os.read(stream.incoming, 1)

    with pytest.raises(
        LaunchTimeout, match=r"mlaunch has not answered on machine 0, machine 1 within join_timeout=0\.1 s; "
    ):
        launcher(rank, 1, engine=Threads(serve), join_timeout=0.1)()


@pytest.mark.slow
def test_a_member_that_prints_without_end() -> None:
    """What has no end and no line is kept no more than what is of use, and takes no more time."""
    streams = list[FrameStream]()

    def serve(stream: FrameStream, _host: str) -> None:
        os.set_blocking(stream.outgoing, True)
        with contextlib.suppress(OSError):
            while True:
                os.write(stream.outgoing, b"y" * (1 << 16))

    def note(stream: FrameStream, mark: bytes) -> bytes | None:
        streams.append(stream)
        return skip_to(stream, mark)

    skip_to = FrameStream.skip_to
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrameStream, "skip_to", note)
        with pytest.raises(LaunchTimeout, match=r"has not answered on machine 0 within join_timeout=0\.3 s"):
            launcher(rank, 1, engine=Threads(serve), machines=1, join_timeout=0.3)()
    assert streams
    assert max(len(stream._came) for stream in streams) < 1 << 16


def test_a_member_among_other_words() -> None:
    """A line that only looks like its first one is none; what comes after that is told with its host."""

    def serve(stream: FrameStream, host: str) -> None:
        os.write(stream.outgoing, MARK + b"not found\n")
        hello(Python=platform.python_version())(stream, host)
        os.write(stream.outgoing, b"You have new mail\n")
        os.set_blocking(stream.incoming, True)
        while os.read(stream.incoming, 1 << 16):
            pass

    with pytest.raises(
        LaunchError, match=r"^host m0 wrote something that is not from mlaunch .*beginning b'You have new mail"
    ):
        launcher(rank, 1, engine=Threads(serve), machines=1)()


def test_other_words_while_ranks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def print_instead(launch: MachineLaunch, _fd: int) -> bool:
        with contextlib.suppress(OSError):  # the caller has left by then
            os.write(launch._stream.outgoing, b"Broadcast message from root")
        return False

    monkeypatch.setattr(MachineLaunch, "_carry", print_instead)

    def work() -> None:
        print("anything", flush=True)
        signal.pause()

    words = r"^host m0 of \S+work\(\) was lost: the host wrote something that is not from mlaunch .*b'Broadcast message"
    with pytest.raises(LaunchError, match=words):
        launcher(work, 1, engine=Threads(), machines=1, grace_period=0.1)()


@pytest.mark.slow
def test_a_held_machine_that_falls_silent_is_replaced(engine: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that finds it so waits for it; the next one asks for others."""
    with engine.hold(2, 1) as held:
        call = launcher(rank, engine=held)
        assert call() == [0, 1]
        with monkeypatch.context() as patch:
            patch.setattr(member._Member, "_offer", lambda _member, _order: None)
            with pytest.raises(LaunchTimeout, match=r"has not answered on m0, m1 within join_timeout=0\.2 s"):
                call.options(join_timeout=0.2)()
        assert call() == [0, 1]
    assert len(engine.placements) == 2


@pytest.mark.nightly
@pytest.mark.slow
def test_a_fork_server_that_is_killed_over_there() -> None:
    def work() -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(parent(os.getppid()), signal.SIGKILL)
        signal.pause()

    there = Hosts(["a", "b"], ssh=["sh", "-c", 'exec sh -c "$2"', "sh"])
    with pytest.raises(LaunchError, match=r"^the fork server of \S+work\(\) was killed by SIGKILL\n  host ") as caught:
        launcher(work, 1, engine=there, grace_period=0.1)()
    assert "sys.exit" not in str(caught.value)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_fork_server_that_is_stopped_over_there() -> None:
    """As its ranks return: their values are there, but nobody can say that all is over."""

    def work() -> None:
        if dist.get_rank() == 1:
            os.kill(parent(os.getppid()), signal.SIGSTOP)

    there = Hosts(["a", "b"], ssh=["sh", "-c", 'exec sh -c "$2"', "sh"])
    by_member = r"the fork server of \S+work\(\) did not answer \(was it stopped\?\) and was killed\n  host "
    by_caller = r"\S+work\(\) did not finish within its deadline of 8 s; one of its machines did not answer \(was some"
    with pytest.raises(LaunchError, match=f"^({by_member}|{by_caller})"):
        launcher(work, 1, engine=there, grace_period=0.1, deadline=8)()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"machines": -1}, "machines=-1: allowed: whole numbers from 1"),
        ({"machines": 0}, "machines=0: allowed: whole numbers from 1"),
        ({"machines": "2"}, "machines='2': allowed: whole numbers from 1"),
        ({"n_gpus": 0}, "n_gpus=0: allowed"),
        ({"idle_timeout": "60"}, "idle_timeout='60': allowed: a number of seconds"),
        ({"idle_timeout": -1}, "idle_timeout=-1: allowed: seconds, more than 0"),
    ],
)
def test_options_of_held_machines_are_checked_before_anything_is_asked_for(options: dict[str, Any], words: str) -> None:
    engine = Threads()
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        engine.hold(**options)
    assert not engine.placements


def test_held_machines_say_what_they_wait_for(capfd: pytest.CaptureFixture[str]) -> None:
    with Threads(states=["queued (Priority)", "queued (Resources)"]).hold(1):
        said = capfd.readouterr().err.splitlines()
    assert said == ["mlaunch: hold() waits: queued (Priority)", "mlaunch: hold() waits: queued (Resources)"]


def test_a_machine_that_is_lost_while_ranks_run(tmp_path: Path) -> None:
    """The connection to it ends; the ranks of the other one are stopped."""
    running = tmp_path / "running"
    os.mkfifo(running)

    def serve(stream: FrameStream, host: str) -> None:
        if host == "m1":
            threading.Thread(target=cut, args=(os.dup(stream.outgoing),), daemon=True).start()
        member.serve(stream, host)

    def cut(fd: int) -> None:
        running.read_text()
        with socket.socket(fileno=fd) as connection:
            connection.shutdown(socket.SHUT_RDWR)

    def work() -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            running.write_text("x")
        threading.Event().wait()

    with pytest.raises(LaunchError, match=r"(?s)host m1 of .* was lost: POWER_CUT on m1"):
        launcher(work, 1, engine=Threads(serve), grace_period=0.1)()


@pytest.mark.slow
def test_machines_that_hear_nothing_any_more_leave(
    engine: Threads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They give themselves back. A call that runs is ended."""
    monkeypatch.setattr(Placed, "farewell", ["mkdir", "-p", str(tmp_path / "given back")])
    monkeypatch.setattr(machines.Heartbeats, "_run", lambda beats: beats._streams[1].send(beats._heartbeat))
    engine.heartbeat_timeout = 0.05
    with pytest.raises(LaunchError, match=r"host m1 of pause\(\) was lost"):
        launcher(signal.pause, 1, engine=engine, grace_period=0.5)()
    assert (tmp_path / "given back").is_dir()
    assert "nothing has come from the caller for 0.05 s, so this machine leaves" in capfd.readouterr().err
    with engine.hold(n_gpus=1):
        engine.placements[-1].threads[1].join(LIMIT)
        assert not engine.placements[-1].threads[1].is_alive()


@pytest.mark.slow
def test_a_machine_that_leaves_waits_for_its_ranks_at_rest(engine: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take their grace period, in which it looks a few times, and not without a pause."""
    looks = list[bool]()
    look = MachineLaunch._step
    monkeypatch.setattr(MachineLaunch, "_step", lambda launch: looks.append(launch._alone) or look(launch))
    monkeypatch.setattr(machines.Heartbeats, "_run", lambda beats: beats._streams[0].send(beats._heartbeat))
    engine.heartbeat_timeout = 1.0  # in which the machine has begun

    def stay() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()

    with pytest.raises(LaunchError, match="host m0 of "):
        launcher(stay, 1, engine=engine, machines=1, grace_period=1.0)()
    assert 0 < sum(looks) < 100


def test_heartbeats_are_sent(engine: Threads) -> None:
    engine.heartbeat_timeout = 0.5
    with engine.hold(n_gpus=1) as cluster:
        beats = cluster._machines._heartbeats
        assert beats is not None
        for _ in range(3):
            assert launcher(rank, engine=cluster)() == [0, 1]
    assert not beats._thread.is_alive()
    engine.heartbeat_timeout = None
    assert launcher(rank, 1, engine=engine)() == [0, 1]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"machines": 2}, "machines=2 without engine=: only an engine"),
    ({"engine": Threads(), "world_size": 4}, "world_size=4 with engine=: allowed: None"),
    ({"engine": Threads(), "output": "raw"}, "output='raw' with engine=: ranks on other machines have no stream"),
]


@pytest.mark.parametrize(("options", "words"), WRONG, ids=[words for _, words in WRONG])
def test_options_that_do_not_go_with_engines(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        launcher(rank, **options)


MISMADE: list[tuple[Callable[[], object], str]] = [
    (lambda: Hosts(["a"], ssh="ssh -p 22"), "ssh='ssh -p 22': allowed: a list of strings, ['ssh', '-p', '2222']"),
    (lambda: Hosts(["a"], ssh=["ssh", "-p", 22]), "ssh=['ssh', '-p', 22]: allowed: a list of strings"),
    (lambda: Hosts(["a", 2]), "hosts=['a', 2]: allowed: a list of strings, ['a', 'b:4']; 2 is none"),
    (lambda: Hosts(["a"], cwd=3), "cwd=3: allowed: a string"),
    (lambda: Slurm(host=3), "host=3: allowed: a string"),
    (lambda: Slurm(nodelist=["n1", "n2"]), "Slurm: nodelist=['n1', 'n2']: allowed: a string, a whole number, True"),
    (lambda: Slurm(python=3), "python=3: allowed: a string"),
    (lambda: Ray(address=None), "address=None: allowed: a string"),
    (lambda: Ray(resources=4), "resources=4: allowed: a mapping of names to numbers from 0"),
    (lambda: Ray(resources={"GPU": "4"}), "resources={'GPU': '4'}: allowed: a mapping of names to numbers from 0"),
    (lambda: Command(7), "command=7: allowed: 'mpirun -N 1', or a list of strings, ['mpirun', '-N', '1']"),
    (lambda: Command("mpirun -N 1", python=3), "python=3: allowed: a string"),
]


def test_other_mistakes() -> None:
    with pytest.raises(TypeError, match=r"engine=<class .*allowed: an engine such as mlaunch.engines"):
        launcher(rank, engine=Threads)
    with pytest.raises(ValueError, match="output='raw' with engine=: ranks on other machines have no stream"):
        Ranks(engine=Threads(), output="raw")
    engine = Threads()
    engine.heartbeat_timeout = 0
    with pytest.raises(ValueError, match="heartbeat_timeout=0: allowed: seconds, more than 0, or None"):
        launcher(rank, engine=engine)()
    with pytest.raises(ValueError, match="allowed: a list of at least one name"):
        Hosts("a")
    with pytest.raises(ValueError, match="'b:many': allowed: a name, or a name and a number of ranks"):
        Hosts(["a", "b:many"])
    for made in (lambda name: Hosts(["a", name]), lambda name: Hosts([f"{name}:4"]), lambda name: Slurm(host=name)):
        with pytest.raises(ValueError, match=r"host '-oProxyCommand=id(:4)?': allowed: a name as ssh takes it"):
            made("-oProxyCommand=id")
    with pytest.raises(ValueError, match="machines=3 with 2 hosts: allowed: 1 to 2"):
        launcher(rank, engine=Hosts(["a", "b:4"]), machines=3)()
    with pytest.raises(TypeError, match="nodes= is set by mlaunch itself"):
        Slurm(nodes=3)
    with pytest.raises(ValueError, match="allowed: a command that starts a process"):
        Command("")
    for make, words in MISMADE:
        with pytest.raises(TypeError, match=re.escape(words)):
            make()
    with pytest.raises(ValueError, match=re.escape("resources={'GPU': -1}: allowed: a mapping of names to numbers")):
        Ray(resources={"GPU": -1})
    with pytest.raises(ValueError, match="python='': allowed: a name"):
        Hosts(["a"], python="")
    assert repr(Slurm(gpus_per_node=8, exclusive=True)) == "Slurm(--gpus-per-node=8 --exclusive)"
    assert (repr(Hosts(["a", "b:4"])), repr(Command("mpirun -N 1"))) == ("Hosts(['a', 'b'])", "Command('mpirun -N 1')")


REFUSED = [
    (["--engine", "pbs"], "--engine pbs: allowed: slurm[:NAME=VALUE,...], ssh:HOST"),
    (["--engine", "ssh:"], "--engine ssh:: hosts=[]: allowed: a list of at least one name"),
    (["--engine", "slurm:nodes=2"], "--engine slurm:nodes=2: Slurm: nodes= is set by mlaunch itself"),
    (["--engine", "ssh:me@a:2222"], "a port is said as ssh does, 'ssh://me@b:2222'"),
    (["--engine", "slurm", "--devices", "1"], "--devices with --engine: the engine decides that; give one of the two"),
    (["--engine", "ssh:a", "--nnodes", "2"], "machines=2 with 1 hosts: allowed: 1 to 1"),
    (["--max-preemptions", "2"], "--max-preemptions 2 without --engine: only an engine can place the ranks again"),
    (["--engine", "ssh:a", "--max-preemptions", "-1"], "--max-preemptions -1: allowed: 0 or more"),
]


@pytest.mark.parametrize(("flags", "words"), REFUSED, ids=[" ".join(flags) for flags, _ in REFUSED])
def test_command_lines_that_are_refused(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(SystemExit) as left:
        main(["run", *flags, str(tmp_path / "train.py")])
    assert left.value.code == 2
    assert words in capsys.readouterr().err


SCRIPT = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
names = "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE"
print(*(os.environ[name] for name in names), sys.argv[1:], flush=True)
dist.barrier()  # else one may be ended before it has printed
if sys.argv[1] == "fail" and dist.get_rank() == 2:
    os._exit(7)
dist.barrier()
"""


@pytest.mark.parametrize(("word", "status"), [("well", 0), ("fail", 7)])
def test_a_script(
    word: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = Threads()
    engine.python = "python-over-there"
    monkeypatch.setattr(run_on_engine, "engine_named", lambda _name: engine)
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    logs = tmp_path / "logs"
    flags = ["--engine", "threads", "--nnodes", "2", "--nproc-per-node", "2", "--tee", "1", "--log-dir", str(logs)]
    assert main(["run", *flags, "--events", "events", "train.py", word]) == status
    told = capfd.readouterr()
    events = [json.loads(line)["event"] for line in (tmp_path / "events").read_text().splitlines()]
    assert [event for event in events if event != "rank"] == ["launch", *["failure"] * bool(status), "end"]
    assert sorted(line for line in told.out.splitlines() if "[m" in line) == [
        f"[m{node}:{rank}] {rank} {local} {node} 3 ['{word}']"
        for rank, local, node in ((0, 0, 0), (1, 1, 0), (2, 0, 1))
    ]
    [directory] = logs.iterdir()
    kept = sorted(str(path.relative_to(directory)) for path in directory.rglob("stdout*"))
    assert kept == [f"attempt_0/{rank}/stdout.log" for rank in range(3)]
    if status:
        assert "mlaunch: rank 2 of train.py exited with code 7 (sys.exit or os._exit)\n  host m1, " in told.err


UNTIL_TOLD = """
import os, pathlib, torch.distributed as dist
import mlaunch
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo")
dist.barrier()  # else one may be over while the other still connects to it
if attempt == "0":
    if dist.get_rank() == 0:
        pathlib.Path(os.environ["MARKER"]).touch()
    while not mlaunch.stopping():
        dist.barrier()
print(f"attempt {attempt}: {mlaunch.stopping() or 'done'}")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_script_whose_machines_are_taken_starts_anew_on_others(
    marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = Taken(1)
    monkeypatch.setattr(run_on_engine, "engine_named", lambda _name: engine)
    monkeypatch.setenv("MARKER", str(marker))
    (tmp_path / "train.py").write_text(UNTIL_TOLD)
    flags = ["--engine", "threads", "--nnodes", "2", "--stop-on", "TERM", "--max-preemptions", "2"]
    assert main(["run", *flags, str(tmp_path / "train.py")]) == 0
    told = capfd.readouterr()
    lines = sorted(line.partition("] ")[2] for line in told.out.splitlines() if "attempt" in line)
    assert lines == ["attempt 0: TERM"] * 2 + ["attempt 1: done"] * 2
    assert "mlaunch: train.py starts again on other machines (preemption 1 of at most 2): the sch" in told.err
    assert len(engine.placements) == 2


PLANTED = ("cloudpickle", "json", "mlaunch", "multiprocessing", "runpy", "torch")
STARTERS = {  # as mpirun and ssh start a command
    "Command": 'OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 exec "$@"',
    "Hosts": 'eval "$2"',
    "here": "",
}


@pytest.mark.parametrize("engine", STARTERS)
def test_the_callers_current_directory_has_no_modules(engine: str, tmp_path: Path) -> None:
    """There others may have left some, and neither the caller's interpreter nor a script on the machine looks there."""
    shared, home = tmp_path / "shared", tmp_path / "home"
    shared.mkdir()
    home.mkdir()
    for name in PLANTED:
        (shared / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    starter = home / "starter"
    starter.write_text(f"#!/bin/sh\n{STARTERS[engine]}\n")
    starter.chmod(0o755)
    made = {"Command": f"Command([{str(starter)!r}])", "Hosts": f"Hosts(['a'], ssh=[{str(starter)!r}])", "here": "None"}
    script = home / "train.py"
    script.write_text(
        "import mlaunch\nfrom mlaunch.engines import Command, Hosts\n"
        f"print(mlaunch.launcher(lambda: 1, n_gpus=1, device_type='cpu', engine={made[engine]})())\n"
    )
    done = subprocess.run(
        [sys.executable, script], cwd=shared, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.stdout == "[1]\n", done.stderr
    assert not (tmp_path / "ran").exists()


class Taken(Threads):
    """Its machines are taken by the scheduler as often as this says, and then no more."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def place(self, machines: int | None, command: Sequence[str]) -> Placement:
        placed = super().place(machines, command)
        placed.preempted = lambda: len(self.placements) <= self.times  # type: ignore[method-assign]
        return placed


def work_until_told(marker: Path) -> str:
    """Is told to stop at the first attempt, in the middle of which the scheduler's signal comes."""
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if dist.get_rank() == 0:
        (marker.parent / attempt).touch()
    dist.barrier()
    if attempt == "2":
        return "done"
    if dist.get_rank() == 0:
        marker.touch()
    while not (reason := mlaunch.stopping()):
        dist.barrier()
    return f"saved by {reason}"


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As long as it is there, the scheduler's signal comes to some machine."""
    path = tmp_path / "the signal comes"

    def take(_: object) -> str:
        try:
            path.unlink()
        except FileNotFoundError:
            return ""
        return "TERM"

    monkeypatch.setattr(SignalsHere, "take", take)
    return path


@pytest.mark.slow
def test_a_call_whose_machines_are_taken_starts_anew_on_others(marker: Path) -> None:
    engine = Taken(2)
    ours = launcher(work_until_told, 1, engine=engine, stop_on="TERM", max_preemptions=3)
    with pytest.warns(RuntimeWarning, match=r"starts again on other machines \(preemption [12] of at most 3\)") as told:
        assert ours(marker) == ["done"] * 2
    assert (len(told), len(engine.placements)) == (2, 3)
    assert ours.last is not None
    assert ours.last.stopped is None


@pytest.mark.slow
@pytest.mark.parametrize(("times", "most", "attempts"), [(5, 1, 2), (0, 5, 1), (5, 0, 1)])
def test_a_preempted_call_does_not_start_anew_for_ever(marker: Path, times: int, most: int, attempts: int) -> None:
    """Nor if the machines were not taken, as where the time of a job is over."""
    ours = launcher(work_until_told, 1, engine=Taken(times), stop_on="TERM", max_preemptions=most)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ours(marker) == ["saved by TERM"] * 2
    assert sorted(path.name for path in marker.parent.iterdir()) == list(map(str, range(attempts)))


@pytest.mark.slow
def test_ranks_that_were_killed_with_their_machines_are_counted_apart() -> None:
    """``max_restarts`` is for what fails by itself."""

    def fail() -> str:
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if attempt != "2":
            raise ValueError(f"attempt {attempt}")
        return "done"

    ours = launcher(fail, 1, engine=Taken(1), max_preemptions=1, max_restarts=1)
    with pytest.warns(RuntimeWarning) as told:
        assert ours() == ["done"] * 2
    first, second = [str(warning.message) for warning in told]
    assert "(preemption 1 of at most 1)" in first
    assert "is started again (restart 1 of at most 1): " in second


@pytest.mark.slow
def test_a_request_to_stop_ends_a_preempted_call(marker: Path) -> None:
    """Though the machines were taken, too."""
    ours = launcher(work_until_told, 1, engine=Taken(5), stop_on="USR1", max_preemptions=5)

    def press() -> str:
        with contextlib.suppress(FileNotFoundError):  # the other machine's thread has pressed
            marker.unlink()
            os.kill(os.getpid(), signal.SIGUSR1)
        return ""

    with mock.patch.object(SignalsHere, "take", side_effect=press):
        assert ours(marker) == ["saved by USR1"] * 2
