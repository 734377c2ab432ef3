"""Parts of a visit of the debugger: who is refused, and the limits of groups meanwhile."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mlaunch.debug.agent import DebugVisits
from mlaunch.debug.wire import COME, DebugTerms, HoldLimits, Visited
from mlaunch.protocol import registry
from mlaunch.rank import device
from mlaunch.torch_parts.process_groups import HeldLimits


def came(sections: dict[str, object]) -> tuple[DebugVisits, list[object], socket.socket, dict[str, Any]]:
    """Return a part whose visitor has come, what it does, the visitor's end, and what that is answered."""
    done: list[object] = []
    spec = SimpleNamespace(call=SimpleNamespace(name="train()"), timeout=7.0, local_world_size=1, world_size=1)
    scene: Any = SimpleNamespace(
        spec=spec, sections=sections, known=lambda: [0], tell=lambda rank, word: done.append((rank, word)),
        say=done.append, hold_deadline=lambda *, held: done.append(held),
    )  # fmt: skip
    visits, (our_end, theirs) = DebugVisits(scene), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    visits.welcome(theirs, COME)
    _, fds, _, _ = socket.recv_fds(our_end, 1, 1)
    return visits, done, our_end, registry.read_status(fds[0])


def test_the_callers_own_debugger_goes_first() -> None:
    visits, done, visitor, told = came({"debug": DebugTerms("pdb")})
    visitor.close()
    assert told == {"refused": "train() was called with debug=: its ranks' prompts are where that call was made"}
    assert (done, visits.fds()) == ([], [])


def test_limits_are_held_as_long_as_a_visitor_stays() -> None:
    """Also those of a call that begins meanwhile, on ranks that stay."""
    visits, done, visitor, told = came({})
    assert told == {"timeout": 7.0, "alone": True}
    assert done == [True, Visited(True, os.getpid()), (0, HoldLimits(True))]
    visits.take_steps()
    assert done[3:] == [True]
    visitor.close()
    visits.take_steps()
    assert done[4:] == [False, Visited(False, os.getpid()), (0, HoldLimits(False))]
    assert visits.fds() == []
    visits.close()


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
