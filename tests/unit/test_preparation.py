"""Whether a launch that was prepared is there, as its caller finds out."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlaunch.base import linux
from mlaunch.caller import warm_server
from mlaunch.protocol.messages import AgentFailed, AgentStarted, RanksStarting
from mlaunch.protocol.spec import LaunchSpec
from tests.contract.conftest import as_users_have_it
from tests.processes import status_of, wait_until

pytest.importorskip("torch", reason="its ranks need torch")

__all__ = ["as_users_have_it"]  # a fixture


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize(
    ("first", "is_there"),
    [
        (RanksStarting(0.0, "launch", 0, 2, os.getpid()), True),  # overtook the fork server's word
        (AgentStarted(os.getpid()), True),
        (AgentFailed("no memory"), False),
    ],
    ids=["overtook", "forked", "refused"],
)
def test_whether_it_is_there(monkeypatch: pytest.MonkeyPatch, first: Any, is_there: bool) -> None:
    monkeypatch.setattr(warm_server, "shape_of", lambda spec: spec)
    few = SimpleNamespace(
        cluster=None, target=None, port=0, restarts=SimpleNamespace(count=0), local_world_size=2, sections={}
    )
    server, spec = warm_server.warm_server.get(os.environ), cast(LaunchSpec, few)
    preparation = warm_server.Preparation()
    agent = preparation.expect(server, spec)
    assert agent is not None
    with contextlib.closing(agent):
        agent.try_send(first)
        taken = preparation.take(server, spec)
    assert (taken is not None) is is_there
    if taken is not None:
        taken.close()


@pytest.fixture
def stopped() -> Iterator[int]:
    """A child of this process that is stopped."""
    process = subprocess.Popen(["sleep", "infinity"])
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: status_of(process.pid)[0] == "T")
    yield process.pid
    process.kill()
    process.wait()


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize("overtaken", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_a_stopped_agent_serves_no_call_and_is_killed(
    monkeypatch: pytest.MonkeyPatch, stopped: int, overtaken: bool, wanted: bool
) -> None:
    """Whichever of its records comes first, and whether a call wants its launch or it is dropped."""
    monkeypatch.setattr(warm_server, "shape_of", lambda spec: spec)
    few = SimpleNamespace(
        cluster=None, target=None, port=0, restarts=SimpleNamespace(count=0), local_world_size=2, sections={},
        context=SimpleNamespace(environ=os.environ),
    )  # fmt: skip
    server, spec = warm_server.warm_server.get(os.environ), cast(LaunchSpec, few)
    preparation = warm_server.Preparation()
    agent = preparation.expect(server, spec)
    assert agent is not None
    pidfd = os.pidfd_open(stopped)
    records: list[tuple[Any, list[int]]] = [
        (AgentStarted(stopped), [pidfd]), (RanksStarting(0.0, "launch", 0, 2, stopped), [])
    ]  # fmt: skip
    with contextlib.closing(agent):
        for record, fds in records[::-1] if overtaken else records:
            agent.try_send(record, fds)
        if wanted:
            assert preparation.take(server, spec) is None
        else:
            preparation.drop()
    assert linux.wait_readable([pidfd], 60.0)  # it has ended
    os.close(pidfd)
