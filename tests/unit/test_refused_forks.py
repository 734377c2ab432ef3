"""A fork server whose fork the system refuses."""

from __future__ import annotations

import os

import pytest

from mlaunch.base.fds import OwnedFds
from mlaunch.forkserver.children import Children, Launch, begin_launch
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import Reaped
from mlaunch.protocol.server_messages import LaunchFds


@pytest.mark.slow
def test_a_fork_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root is exempt from RLIMIT_NPROC, so the refusal itself is made up; the way it takes is real."""

    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    ours, theirs = Channel.pair()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", refuse)
    children, fds = Children(), LaunchFds(-1, -1, os.dup(theirs.fileno()), -1, -1)
    begin_launch(Launch(fds, more=True), children, OwnedFds)
    assert not children
    assert len(os.listdir("/proc/self/fd")) == before
    refused, _ = ours.receive()
    assert refused.text.startswith("its agent could not be forked: Resource temporarily unavailable: ")
    assert ours.receive()[0] == Reaped(1)
    ours.close()
    theirs.close()
