"""Parts of a visit of the debugger: who is refused, and the limits of groups meanwhile."""

from __future__ import annotations

import socket
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mlaunch.agent.debug_visit import DebugVisit
from mlaunch.agent.questions import Questions
from mlaunch.protocol import visitors
from mlaunch.protocol.visitors import DEBUG
from mlaunch.rank.setup import device
from mlaunch.torch_parts.limits import HeldLimits


def test_the_callers_own_debugger_goes_first() -> None:
    spec: Any = SimpleNamespace(debug="pdb", call=SimpleNamespace(name="train()"))
    visit, (our_end, theirs) = DebugVisit(lambda: spec), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    assert visit.take(theirs, DEBUG, Questions({})) is None
    _, fds, _, _ = socket.recv_fds(our_end, 1, 1)
    our_end.close()
    assert visitors.read_status(fds[0]) == {
        "refused": "train() was called with debug=: its ranks' debugger is where that was"
    }


@pytest.mark.ranks(2)
def test_limits_are_lifted_and_given_back() -> None:
    group = dist.new_group(timeout=timedelta(seconds=7))
    limits = HeldLimits()
    limits.hold(device.limit(None))
    limits.hold(device.limit(None))
    assert limit_of(group) > timedelta(days=1)
    later = dist.new_group()
    limits.give_back()
    assert limit_of(group) == timedelta(seconds=7)
    assert limit_of(later) > timedelta(days=1)
    assert limit_of(dist.new_group()) < timedelta(hours=1)
    dist.barrier()


def limit_of(group: Any) -> timedelta:
    found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return found
