"""The parts of engines that need no machines."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlaunch.base import linux
from mlaunch.base.exceptions import LaunchError, LaunchTimeout
from mlaunch.engines.caller import slurm
from mlaunch.engines.caller.machines import Machine, Machines
from mlaunch.engines.caller.placement import Ends, Processes
from mlaunch.engines.caller.ray import Pump
from mlaunch.engines.caller.slurm import Allocation, Existing, Shell, fate_of
from mlaunch.engines.member import main, started_together
from mlaunch.engines.member.member import MachinePlan
from mlaunch.engines.wire import MARK, AskOffer, Listen, command_of
from mlaunch.engines.wire.first_process import MARK as MARK_OF_FIRST
from mlaunch.engines.wire.first_process import Lead, ProcessAddress
from mlaunch.engines.wire.frame_stream import FrameStream
from mlaunch.forkserver.children import NextLaunch
from mlaunch.rendezvous.address import identity
from tests.conftest import ROOT
from tests.processes import children, wait_gone, wait_until


class FakeShell:
    """Answers as Slurm's commands would. ``sbatch``, ``scancel``, ``left``: what a guard runs for these, and squeue.

    ``answers``: what others are told, by the command; ``states``: of the job that was asked for.
    """

    def __init__(self, sbatch: str, scancel: str = ":", left: str = ":", **answers: str) -> None:
        self.answers: dict[str, str | None] = {**answers}
        self.commands = {"sbatch": sbatch, "scancel": scancel, "squeue": left, "sleep": ":"}

    def command(self, args: Sequence[str]) -> list[str]:
        functions = "; ".join(f"{name}() {{ {text}; }}" for name, text in self.commands.items())
        return [*args[:2], f"{functions}\n{args[2]}", *args[3:]]

    def environ(self) -> Mapping[str, str]:
        return os.environ

    def ask(self, *args: str) -> str:
        return self.answer(*args) or ""

    def answer(self, *args: str) -> str | None:
        return self.answers.get("states" if "--format=%T %r" in args else args[0], "")


def granted(allocation: Allocation) -> None:
    while allocation.state():
        pass


def given_back(allocation: Allocation) -> None:
    allocation.release()
    allocation.wait()


def test_an_allocation_that_waits_and_comes() -> None:
    """What a site says beside it is no number of a job."""
    said = "echo 'charged to allocation 20231'; echo 99 problems; echo '7;cluster'; echo 20232 >&2"
    shell = FakeShell(said, states="PENDING Priority", scontrol="n1\nn2", squeue="n[1-2]")
    allocation = Allocation(shell, ["--nodes=2"], 2, None)
    while (state := allocation.state()) == "asks Slurm for an allocation":
        pass
    assert state == "job 7 is queued by Slurm (Priority)"
    shell.answers["states"] = None
    assert "its controller does not answer" in allocation.state()
    shell.answers["states"] = "CONFIGURING None"
    assert allocation.state() == "job 7 is configuring"
    shell.answers["states"] = "RUNNING None"
    granted(allocation)
    assert (allocation.job, allocation.nodes) == ("7", ["n1", "n2"])
    given_back(allocation)


def test_an_allocation_that_does_not_come() -> None:
    allocation = Allocation(FakeShell('echo "sbatch: error: Invalid partition" >&2; false'), [], 1, 300.0)
    with pytest.raises(LaunchError, match="Slurm gives no allocation:\n  sbatch: error: Invalid partition"):
        granted(allocation)
    given_back(allocation)
    allocation = Allocation(FakeShell("echo 7", states="CANCELLED None"), [], 1, 300.0)
    with pytest.raises(LaunchError, match="Slurm has ended job 7 before it was used: CANCELLED None"):
        granted(allocation)
    given_back(allocation)


def test_an_allocation_is_given_back_until_that_is_confirmed(tmp_path: Path) -> None:
    """The controller is away for some attempts, and then knows the job for some more."""
    asked = f"echo >> {tmp_path}/asked; set -- $(wc -l < {tmp_path}/asked)"
    left = f"{asked}; [ $1 -gt 3 ] || return 1; [ $1 -gt 6 ] || echo 7"
    allocation = Allocation(FakeShell("echo 7", f"echo >> {tmp_path}/gone", left), [], 1, None)
    given_back(allocation)
    assert (tmp_path / "gone").stat().st_size >= 3
    given_back(allocation)  # which does nothing any more


def test_an_allocation_that_is_not_given_back_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the command that does it."""
    monkeypatch.setattr("mlaunch.engines.caller.slurm._END_TIMEOUT", 0.0)
    allocation = Allocation(FakeShell("echo 7", left="echo 7"), [], 1, None)
    while allocation.job != "7":
        with contextlib.suppress(LaunchError):
            allocation.state()
    given_back(allocation)
    said = capsys.readouterr().err
    assert "Slurm has not confirmed that job 7 has ended" in said
    assert "; if it stays: scancel --quiet --name=mlaunch-" in said
    allocation._guard.wait(60)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_allocation_whose_guard_was_killed_or_stopped_is_given_back(
    tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = FakeShell("echo 7", f"echo >> {tmp_path}/gone", states="RUNNING None", scontrol="n1", squeue="n1")
    allocation = Allocation(shell, [], 1, None)
    granted(allocation)
    os.kill(allocation._guard.pid, number)
    given_back(allocation)
    assert (tmp_path / "gone").exists()
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_a_guard_that_is_stopped_while_it_gives_back_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mlaunch.engines.caller.slurm._END_TIMEOUT", 0.5)
    there = f"[ -e {tmp_path}/stopped ] || {{ touch {tmp_path}/stopped; kill -STOP $$; }}"
    allocation = Allocation(FakeShell("echo 7", left=there), [], 1, None)
    allocation.release()
    wait_until(lambda: linux.is_stopped(allocation._guard.pid))
    allocation.wait()
    assert allocation._guard.wait(60) == 0


def test_a_job_in_which_no_member_is_ends(tmp_path: Path) -> None:
    """A controller that does not answer has not said so."""
    answers = "1) return 1 ;; 2) echo 7.batch; echo 7.0 ;; 3) echo 7.batch; echo 7.extern ;;"
    squeue = f"squeue() {{ echo >> {tmp_path}/asked; case $(wc -l < {tmp_path}/asked) in {answers} esac; }}"
    script = f"sleep() {{ :; }}; {squeue}\n{slurm._STAY % 10}"
    assert subprocess.run(["sh", "-c", script], check=False, timeout=60).returncode == 0
    assert (tmp_path / "asked").read_text() == "\n" * 3


def test_the_variables_of_an_outer_job_are_left_out_and_those_of_a_user_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SLURM_CPU_BIND", "SLURM_NTASKS", "PMIX_RANK", "SBATCH_WAIT"):
        monkeypatch.setenv(name, "outer")
    for name in ("SALLOC_PARTITION", "SBATCH_ACCOUNT", "SLURM_CLUSTERS", "SLURM_JWT"):
        monkeypatch.setenv(name, "user")
    found = Shell(None).environ()
    assert {name for name, value in found.items() if value == "user"} == {
        "SALLOC_PARTITION", "SBATCH_PARTITION", "SBATCH_ACCOUNT", "SLURM_CLUSTERS", "SLURM_JWT",
    }  # fmt: skip
    assert "outer" not in found.values()


def test_the_machine_lost_first_has_the_words_of_the_program_that_writes_for_all() -> None:
    """As mpirun does, on the first machine's standard error; that one may be heard of later."""
    machines = Machines(lambda *_: pytest.fail("it is not opened"), "python", None, None, None)
    ours, theirs = os.pipe()
    ends = [Ends(*os.pipe(), ours), Ends(*os.pipe())]
    machines.machines += [Machine(number, end) for number, end in enumerate(ends)]
    os.write(theirs, b"mpirun: node n1 is gone\n")
    os.close(theirs)
    assert machines.end_of(machines.machines[1]) == ("", "mpirun: node n1 is gone")
    assert machines.end_of(machines.machines[0]) == ("", "mpirun: node n1 is gone")
    for machine in machines.machines:
        machine.close()


def test_a_machine_that_is_lost_before_ranks_start_has_its_last_words() -> None:
    machines = Machines(lambda *_: pytest.fail("it is not opened"), "python", None, None, None)
    (out, theirs), (heard, stdin), (err, wrote) = os.pipe(), os.pipe(), os.pipe()
    machine = Machine(0, Ends(stdin, out, err))
    machine.host = "n1"
    machines.machines.append(machine)
    os.write(wrote, b"this machine leaves\n")
    for end in (theirs, wrote):
        os.close(end)
    with pytest.raises(LaunchError, match="host n1 was lost: its member has ended\n  it wrote: this machine leaves"):
        machines.ask([machine], Listen(None), 60.0)
    machine.close()
    os.close(heard)


def test_a_machine_waits_for_a_fork_server_that_was_stopped_no_longer_than_its_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stopped:
        def ready(self, deadline: float | None = None) -> None:
            raise LaunchTimeout(f"{deadline} s have passed")

    monkeypatch.setattr("mlaunch.engines.member.member.warm_server", SimpleNamespace(get=lambda _environ: Stopped()))
    with pytest.raises(LaunchTimeout, match=r"^7\.0 s"):
        MachinePlan(AskOffer({"join_timeout": 7.0}, "f()", "/", ()))


def test_ends_are_told_in_slurms_words() -> None:
    assert fate_of(FakeShell("", squeue="NODE_FAIL"), "7", "n2") == "NODE_FAIL (job 7, node n2)"
    assert fate_of(FakeShell("", squeue="RUNNING", sinfo="down*"), "7", "n2") == "node n2 is down*"
    assert fate_of(FakeShell("", squeue="RUNNING", sinfo="idle"), "7", "n2") == ""
    inside = Existing(FakeShell("", squeue="n[1-3]", scontrol="n1 n2 n3"), "9", 2)
    assert (inside.nodes, inside.count, inside.state()) == (["n1", "n2"], 2, "")
    with pytest.raises(ValueError, match="machines=4: job 9 has 3 nodes; allowed: 1 to 3"):
        Existing(FakeShell("", squeue="n[1-3]", scontrol="n1 n2 n3"), "9", 4)
    with pytest.raises(LaunchError, match="does not say which nodes job 9 has"):
        Existing(FakeShell(""), "9", None)


def test_programs_that_reach_machines() -> None:
    processes = Processes()
    ends = processes.start(0, ["sh", "-c", "echo $$; cat; echo done >&2; exit 3"])
    with open(ends.stdout) as out, open(ends.stderr) as err:
        pid = int(out.readline())
        assert processes.fate(1, "ssh to b") == ""
        os.close(ends.stdin)
        assert (out.read(), err.read()) == ("", "done\n")
    assert processes.fate(0, "ssh to a") == "ssh to a exited with code 3"
    processes.end()
    wait_gone([pid])


@pytest.mark.parametrize("when", ["kill -STOP $!; read _", "read _; kill -STOP $!"])
def test_a_process_that_a_program_leaves_stopped_goes_on(when: str) -> None:
    """srun has a helper, which tidies up when srun has ended, and which somebody may have stopped, also meanwhile."""
    processes = Processes()
    helper = "(exec >&- 2>&-; while kill -0 $$; do sleep 0.1; done)"
    ends = processes.start(0, ["sh", "-c", f"{helper} & echo $!; {when}"])
    with open(ends.stdout) as out:
        pid = int(out.readline())
    os.close(ends.stdin)
    processes.end()
    os.close(ends.stderr)
    wait_gone([pid])


def test_a_program_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlaunch.engines.caller.placement._END_TIMEOUT", 0.0)
    processes = Processes()
    ends = processes.start(0, ["sh", "-c", "trap '' TERM; echo $$; while :; do :; done"])
    with open(ends.stdout) as out:
        pid = int(out.readline())
        os.close(ends.stdin)
        processes.end()
        monkeypatch.undo()
        processes.end()
        assert processes.fate(0, "ssh to a") == "ssh to a was killed by SIGKILL"
    os.close(ends.stderr)
    wait_gone([pid])


def test_a_launch_that_cannot_be_prepared_is_refused_by_the_end_of_its_socket() -> None:
    ours, theirs = socket.socketpair()
    following = NextLaunch()
    with ours:
        following.want(theirs.detach())
        assert not following.wanted
        assert ours.recv(1) == b""


def test_an_actor_passes_on_bytes() -> None:
    pump = Pump(["sh", "-c", "cat; echo words >&2"])
    pump.write(b"there and back")
    assert pump.read("stdout") == b"there and back"
    pump.write(b"")
    pump.write(b"too late")
    assert pump.read("stderr") == b"words\n"
    assert (pump.read("stdout"), pump.read("stderr"), pump.exitcode()) == (b"", b"", 0)


def test_an_actor_whose_caller_stops_before_its_first_word_ends_its_member() -> None:
    assert Pump(["cat"], 0.05).exitcode() == -signal.SIGKILL
    pump = Pump(["cat"], 600.0)
    pump.renew()
    pump.write(b"there and back")
    assert pump.read("stdout") == b"there and back"
    pump.write(b"")
    assert pump.exitcode() == 0


def test_processes_that_were_started_together_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one connects to another, whose secret it has; a stranger is refused."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    reader, writer = os.pipe()
    with Listener(("127.0.0.1", 0), authkey=b"secret") as listener:
        where = started_together._print_address(writer, listener.address[1], "secret")
        assert (where.number, where.size, where.port) == (1, 2, listener.address[1])
        assert b"mlaunch-joined {" in os.read(reader, 4096)
        found: list[str] = []
        thread = threading.Thread(target=accept, args=(listener, found), daemon=True)
        thread.start()
        with pytest.raises(ConnectionError, match=r"port \d+: tried 255\S+ \(\w.*\), 127\S+ \(somebody else is there"):
            ProcessAddress("b", ("255.255.255.255", "127.0.0.1"), where.port, 1, 2, "guessed").connect()
        with ProcessAddress("b", ("255.255.255.255", "127.0.0.1"), where.port, 1, 2, "secret").connect() as connection:
            connection.sendall(b"hello")
            connection.shutdown(socket.SHUT_WR)
            thread.join(60)
    assert found == ["AuthenticationError", "hello"]
    os.close(reader)
    os.close(writer)


def test_the_process_that_carries_for_all_outlives_what_mpirun_passes_on() -> None:
    """A signal to mpirun comes to all that it has started."""
    ours, theirs = os.pipe(), os.pipe()
    environ = {**os.environ, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    command = [*command_of(sys.executable)[:-1], "mlaunch.engines.member.started_together"]
    carrier = subprocess.Popen(command, stdin=ours[0], stdout=theirs[1], env=environ, cwd=ROOT)
    os.close(ours[0]), os.close(theirs[1])
    with contextlib.closing(FrameStream(theirs[0], ours[1])) as stream:
        where = ProcessAddress.of_line(heard(stream, MARK_OF_FIRST))
        carrier.send_signal(signal.SIGUSR1)
        stream.send(Lead(where.name, {0: where}))
        found = b""
        while MARK not in found:
            linux.wait_readable([stream.fileno()], 60)
            found += b"".join(record.data for record, _ in stream.receive())
        for number in (signal.SIGUSR2, signal.SIGTERM):
            carrier.send_signal(number)
    assert carrier.wait(60) == 0


@pytest.mark.parametrize(("module", "code"), [("main", 0), ("started_together", 1)])
def test_a_member_whose_caller_stops_before_its_first_word_leaves(module: str, code: int) -> None:
    command = [*command_of(sys.executable, 0.1)[:-1], f"mlaunch.engines.member.{module}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT) as member:
        assert member.wait(60) == code
        assert member.stderr is not None
        assert b"nothing has come from the caller for 0.1 s" in member.stderr.read()


def test_a_stopped_member_goes_on_once_its_input_ends() -> None:
    """Also where it is a leader whose whole group is stopped, and is stopped again."""
    (reader, writer), (told, tells) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        os.setpgid(0, 0)
        main.watch(reader)
        os.write(tells, b"watched")
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})  # it notices each
        os.read(reader, 1)
        for _ in range(2):
            signal.sigwait({signal.SIGCONT})
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.close(reader)
    assert os.read(told, 7) == b"watched"
    os.killpg(pid, signal.SIGSTOP)
    wait_until(lambda: linux.is_stopped(pid))
    os.close(writer)
    assert os.waitpid(pid, 0)[1] == 0
    for fd in (told, tells):
        os.close(fd)


def test_a_member_that_is_stopped_goes_on_once_its_caller_is_gone() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(command_of(sys.executable), stdin=pipe, stdout=pipe, cwd=ROOT) as member:
        assert member.stdin is not None
        assert member.stdout is not None
        while MARK not in member.stdout.readline():
            pass
        [waker] = children(member.pid)
        member.send_signal(signal.SIGUSR1)  # as of a scheduler, which sends it to all that it has started
        member.send_signal(signal.SIGSTOP)
        wait_until(lambda: linux.is_stopped(member.pid))
        member.stdin.close()
        assert member.wait(60) == 0
        wait_gone([waker])


def heard(stream: FrameStream, mark: bytes) -> bytes:
    while (line := stream.skip_to(mark)) is None:
        linux.wait_readable([stream.fileno()], 60)
    return line


def test_strangers_hold_up_nobody_who_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those that say nothing, of which the first make room, nor one with another secret."""
    monkeypatch.setattr(started_together, "_STRANGERS", 2)
    found: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    listener = socket.create_server(("127.0.0.1", 0))
    address, port = listener.getsockname()
    thread = threading.Thread(target=admit, args=(listener, found), daemon=True)
    thread.start()
    silent = [socket.create_connection((address, port)) for _ in range(5)]
    with contextlib.ExitStack() as stack:
        for end in silent:
            stack.enter_context(end)
        for end in silent[:3]:
            end.settimeout(60)
            while end.recv(1024):  # its challenge, and then that it was closed
                pass
        with pytest.raises(ConnectionError, match="somebody else is there"):
            ProcessAddress("b", (address,), port, 1, 2, "guessed").connect()
        ours = ProcessAddress("b", (address,), port, 1, 2, "secret").connect()
        with ours, found.get(timeout=60) as theirs, socket.socket(fileno=os.dup(theirs.fileno())) as end:
            ours.sendall(b"hello")
            assert end.recv(5) == b"hello"
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) == bytes(16)
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(60)
    listener.close()


def admit(listener: socket.socket, found: queue.SimpleQueue[Connection]) -> None:
    with contextlib.suppress(OSError):  # it is closed at the end
        started_together._Strangers(b"secret", found).admit_all(listener)


def accept(listener: Listener, found: list[str]) -> None:
    for _ in range(2):
        try:
            with listener.accept() as connection, socket.socket(fileno=os.dup(connection.fileno())) as end:
                found.append(end.makefile().read())
        except Exception as error:
            found.append(type(error).__name__)


def in_own_network(commands: str) -> str:
    """What this machine's network is called and has, there."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, and iproute2")
    code = "from mlaunch.rendezvous.address import *; print(identity()); print(*addresses())"
    inside = ["unshare", "-n", "sh", "-c", f'{commands}; exec "$0" "$@"', sys.executable, "-c", code]
    return subprocess.run(inside, check=True, capture_output=True, text=True, timeout=60, cwd=ROOT).stdout


def test_a_machine_is_named_by_its_network() -> None:
    there = in_own_network("ip link set lo up").splitlines()[0]
    assert there.split()[0] == identity().split()[0]
    assert there != identity()


def test_an_interface_that_is_down_has_no_address_for_others() -> None:
    made = "ip link add d0 type veth peer name d1; ip addr add 10.9.0.1/24 dev d0"
    assert in_own_network(made).splitlines()[1] == ""
    assert in_own_network(f"{made}; ip link set d0 up").splitlines()[1] == "10.9.0.1"
