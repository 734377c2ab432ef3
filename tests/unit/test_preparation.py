"""Whether a launch that was prepared is there, as its caller finds out."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlaunch.caller import warm_server
from mlaunch.protocol.messages import AgentFailed, AgentStarted, RanksStarting
from mlaunch.protocol.spec import LaunchSpec
from tests.contract.conftest import as_users_have_it

pytest.importorskip("torch", reason="its ranks need torch")

__all__ = ["as_users_have_it"]  # a fixture


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize(
    ("first", "is_there"),
    [
        (RanksStarting(0.0, "launch", 0, 2), True),  # overtook the fork server's word
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
