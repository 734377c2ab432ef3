"""The caller's side of a call on several machines: who answers for one, and what is heard of one that is gone."""

from __future__ import annotations

import contextlib
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlaunch.base import linux
from mlaunch.base.exceptions import RankFailure
from mlaunch.caller.running_launches import ask
from mlaunch.engines import Ends
from mlaunch.engines.caller import engine_named
from mlaunch.engines.caller.machines import Machine
from mlaunch.engines.caller.machines_requests import MachinesInspection
from mlaunch.engines.caller.merged_agent import MergedAgent, Patience
from mlaunch.engines.wire import FromAgent, MachineDone, ServerEnded
from mlaunch.engines.wire.frame_stream import FrameStream
from mlaunch.protocol.messages import Cancel
from mlaunch.protocol.registry import STATUS
from tests.contract.test_engine_calls import LIMIT


def test_a_machine_that_does_not_say_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlaunch.engines.caller.machines_requests._PATIENCE", 0.0)
    ours, theirs = socket.socketpair()
    machine = Machine(0, Ends(os.dup(ours.fileno()), ours.detach()))
    machine.host, machine.offered = "m0", cast(Any, SimpleNamespace(local_world_size=1))
    spec = cast(
        Any,
        SimpleNamespace(
            launch_id="f" * 12,
            call=SimpleNamespace(name="f()"),
            world_size=1,
            restarts=SimpleNamespace(count=0),
            context=SimpleNamespace(argv=[], source=""),
        ),
    )
    inspection = MachinesInspection(spec, [machine])
    inspection.open()
    with ThreadPoolExecutor(1) as pool, contextlib.closing(inspection), contextlib.closing(machine), theirs:
        answer = pool.submit(ask, STATUS, spec.launch_id)
        while not answer.done():
            inspection.serve(linux.wait_readable(inspection.fds(), 0.1), [machine])
        (launch,) = answer.result()
    assert launch["ranks"][0]["state"] == "its machine has not said what it does"
    assert ask(STATUS, spec.launch_id) == []


def two_machines() -> tuple[MachinesInspection, list[Machine], list[FrameStream]]:
    """Two that have a rank each, with their members' ends."""
    context = SimpleNamespace(argv=[], source="")
    spec = cast(
        Any, SimpleNamespace(launch_id="e" * 12, call=SimpleNamespace(name="f()"), context=context, sections={})
    )
    pairs = [socket.socketpair() for _ in range(2)]
    machines = [Machine(number, Ends(os.dup(ours.fileno()), ours.detach())) for number, (ours, _) in enumerate(pairs)]
    members = [FrameStream(os.dup(theirs.fileno()), theirs.detach()) for _, theirs in pairs]
    for machine in machines:
        machine.host, machine.offered = f"m{machine.number}", cast(Any, SimpleNamespace(local_world_size=1))
        machine.rank_start = machine.number
    return MachinesInspection(spec, machines), machines, members


def test_the_host_is_named_from_which_nothing_more_came() -> None:
    """Others say that a machine is lost, without its name, and it says nothing itself, not even by its end."""
    inspection, machines, members = two_machines()
    said = RankFailure(None, 0, "was lost: no heartbeat came for 2 s", subject="a machine")
    members[0].send(FromAgent(said))
    members[0].send(MachineDone())
    merged = MergedAgent(machines, 2, lambda _: pytest.fail("m1 has not ended"), Patience(0.1, None), inspection)
    merged.start()
    linux.wait_readable([merged.channel.fileno()], LIMIT)
    told, _ = merged.channel.receive()
    assert (told.host, told.what, told.hints) == ("m0", said.what, ("nothing more came from host m1",))
    assert merged.join(LIMIT)
    for one in (merged.channel, *members, *machines):
        one.close()


def test_others_that_join_are_told_to_leave_when_a_machines_fork_server_has_ended() -> None:
    """They would wait for that machine until join_timeout."""
    inspection, machines, members = two_machines()
    merged = MergedAgent(machines, 2, lambda _: pytest.fail("none has ended"), Patience(LIMIT, None), inspection)
    merged.start()
    members[0].send(ServerEnded("was killed by SIGKILL"))
    linux.wait_readable([members[1].fileno()], LIMIT)
    assert [type(record) for record, _ in members[1].receive()] == [Cancel]
    for member_of in members:
        member_of.send(MachineDone())
    assert merged.join(LIMIT)
    told, _ = merged.channel.receive()
    assert (told.host, told.subject, told.what) == ("m0", "the fork server", "was killed by SIGKILL")
    for one in (merged.channel, *members, *machines):
        one.close()


NAMES = [
    ("slurm:partition=gpu,exclusive,gpus-per-node=8", "Slurm(--partition=gpu --exclusive --gpus-per-node=8)"),
    ("ssh:a,b:4", "Hosts(['a', 'b'])"),
    ("slurm:nodelist='n1,n2',time=1:00:00", "Slurm(--nodelist=n1,n2 --time=1:00:00)"),
    ("slurm:nodelist=n[1,3-5],exclusive", "Slurm(--nodelist=n[1,3-5] --exclusive)"),
    ("ssh:me@a:2,[::1]:2,::1,ssh://me@b:2222*4", "Hosts(['me@a', '::1', '::1', 'ssh://me@b:2222'])"),
    ("ray:GPU=4", "Ray({'GPU': 4.0})"),
    ("command:mpirun -N 1", "Command('mpirun -N 1')"),
]


@pytest.mark.parametrize(("text", "shown"), NAMES)
def test_engines_by_name(text: str, shown: str) -> None:
    assert repr(engine_named(text)) == shown
