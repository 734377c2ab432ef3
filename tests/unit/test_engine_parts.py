"""The parts of engines that need no machines."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Listener
from pathlib import Path

import pytest

from mlaunch.base.errors import LaunchError
from mlaunch.engines import joined
from mlaunch.engines.machine import Machine
from mlaunch.engines.machines import Machines
from mlaunch.engines.meeting import Where
from mlaunch.engines.placement import Ends
from mlaunch.engines.processes import Processes
from mlaunch.engines.ray import Pump
from mlaunch.engines.slurm_allocation import Allocation, Existing, fate_of
from tests.processes import wait_gone


class FakeShell:
    """Answers as Slurm's commands would. ``salloc``: what is run in its place."""

    def __init__(self, salloc: str, **answers: str) -> None:
        self.salloc, self.answers = salloc, answers

    def command(self, args: Sequence[str]) -> list[str]:
        script = f'salloc() {{ {self.salloc}; }}; squeue() {{ :; }}; scancel() {{ echo "gone $*"; }}\n'
        return [*args[:2], script + args[2].replace("exec scancel", "scancel"), *args[3:]]

    def environ(self) -> Mapping[str, str]:
        return os.environ

    def ask(self, *args: str) -> str:
        return self.answers.get(args[0], "")


def granted(allocation: Allocation) -> None:
    while allocation.state():
        pass


def test_an_allocation_that_waits_and_comes(tmp_path: Path) -> None:
    said = 'echo "salloc: Pending job allocation 7"; read x < "$2"; echo "salloc: Granted job allocation 7"'
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    shell = FakeShell(f"set -- {gate} {gate}; {said}", squeue="PENDING Priority", scontrol="n1\nn2")
    allocation = Allocation(shell, ["--nodes=2"], 2)
    while (state := allocation.state()) == "asks Slurm for an allocation":
        pass
    assert state == "job 7 is queued by Slurm (Priority)"
    with open(gate, "w") as pipe:
        print("go", file=pipe)
    granted(allocation)
    assert (allocation.job, allocation.nodes) == ("7", ["n1", "n2"])
    allocation.release()
    allocation.wait()


def test_an_allocation_that_does_not_come() -> None:
    allocation = Allocation(FakeShell('echo "salloc: error: Invalid partition" >&2; false'), [], 1)
    with pytest.raises(LaunchError, match="Slurm gives no allocation:\n  salloc: error: Invalid partition"):
        granted(allocation)
    allocation.release()
    allocation.wait()


def test_who_is_lost_first_has_the_words_of_the_program_that_writes_for_all() -> None:
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


def test_what_slurm_knows_of_an_end() -> None:
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


def test_an_actor_passes_on_bytes() -> None:
    pump = Pump(["sh", "-c", "cat; echo words >&2"])
    pump.write(b"there and back")
    assert pump.read("stdout") == b"there and back"
    pump.write(b"")
    pump.write(b"too late")
    assert pump.read("stderr") == b"words\n"
    assert (pump.read("stdout"), pump.read("stderr"), pump.exitcode()) == (b"", b"", 0)


def test_processes_that_were_started_together_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one connects to another, whose secret it has; a stranger is refused."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    reader, writer = os.pipe()
    with Listener(("127.0.0.1", 0), authkey=b"secret") as listener:
        where = joined._say_where(writer, listener.address[1], "secret")
        assert (where.number, where.size, where.port) == (1, 2, listener.address[1])
        assert b"mlaunch-joined {" in os.read(reader, 4096)
        found: list[str] = []
        thread = threading.Thread(target=accept, args=(listener, found), daemon=True)
        thread.start()
        with pytest.raises(ConnectionError, match="is somebody else"):
            Where("b", "127.0.0.1", where.port, 1, 2, "guessed").connect()
        with Where("b", "127.0.0.1", where.port, 1, 2, "secret").connect() as connection:
            connection.sendall(b"hello")
            connection.shutdown(socket.SHUT_WR)
            thread.join(60)
    assert found == ["AuthenticationError", "hello"]
    os.close(reader)
    os.close(writer)


def accept(listener: Listener, found: list[str]) -> None:
    for _ in range(2):
        try:
            with listener.accept() as connection, socket.socket(fileno=os.dup(connection.fileno())) as end:
                found.append(end.makefile().read())
        except Exception as error:
            found.append(type(error).__name__)
