"""Imports torch, and all that the first launch would import otherwise."""

from __future__ import annotations

import dataclasses
import gc
import sys
import weakref
from collections.abc import Sequence

from mlaunch.protocol.server_messages import Ready

# What the first launch in a new process would otherwise import while its ranks wait for each other.
_PRELOAD = (
    "torch", "torch.distributed", "multiprocessing.synchronize", "mlaunch.agent.main", "mlaunch.rendezvous.store_client"
)  # fmt: skip


def load(preload: Sequence[str]) -> tuple[Ready, int]:
    """Imports; returns what torch offers, and the process that finds out about libuv, for ``finish``.

    Raises whatever an import does; PreloadError; TooOldError.
    """
    from mlaunch.forkserver import preloads
    from mlaunch.rank import reload, slow_imports
    from mlaunch.rank.setup import device, process

    gc.disable()  # imports leave little to collect, and looking for it takes a seventh of a first call
    device.check_version()
    reload.watch()
    slow_imports.prepare()
    with process.noting_variables():
        for module in _PRELOAD:
            __import__(module)
    preloads.load(preload)
    from mlaunch.agent import capacity
    from mlaunch.agent.evidence import Evidence
    from mlaunch.protocol import channel, messages, server_messages
    from mlaunch.rendezvous import tcp_store
    from mlaunch.rendezvous.address import lacks_loopback
    from mlaunch.torch_parts import operations, process_groups

    # Begun here and heard of in finish(): it runs beside the caller, who has its answer by then.
    asked = tcp_store.ask_for_libuv()
    lacks = process_groups.lacks() or operations.lacks()
    operations.watch()  # here, as it takes a third of a millisecond
    Evidence()  # which looks for the cgroup's files once
    capacity.look()
    lacks_loopback()  # an agent that can do without does not try again
    channel.get_to_know([*vars(messages).values(), *vars(server_messages).values()])
    offered = device.offered()
    if lacks:
        from mlaunch.torch_parts import lacking

        offered = dataclasses.replace(offered, lacks=lacking.sentence(lacks))
    return offered, asked


def add(preload: Sequence[str]) -> None:
    """Imports what a process lacks that has imported the rest. Raises whatever an import does; PreloadError."""
    from mlaunch.forkserver import preloads

    if any(module not in sys.modules for module in preload):
        gc.disable()
        preloads.load(preload)
        share()


def finish(asked: int, *, collect: bool) -> None:
    """Ends what ``load`` has begun. ``collect``: looks for garbage before."""
    from mlaunch.rendezvous import tcp_store

    # Garbage would be frozen with the rest, and stay for good.
    if collect:
        gc.collect()
    tcp_store.hear_of_libuv(asked)
    share()


def share() -> None:
    """Prepares for forks what is there: no rank is to copy the pages of what it only inherits."""
    _leave_operators()
    gc.freeze()  # the collector's marks would copy every page that ranks share with us
    # Servers and agents live for days, and what is made from now on is little: json.dump alone left an agent 2 KB for
    # each time that somebody looked at it, a cycle.
    gc.enable()


def _leave_operators() -> None:
    """Lets processes end without taking torch's operators apart, which took a rank of a command most of its time."""
    take_apart = getattr(sys.modules.get("torch.library"), "_del_library", None)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        found = finalizer.peek()
        if found is not None and found[1] is take_apart:
            # torch.library unregisters each operator at the end of an interpreter, which copied 27 MB of shared pages
            # in each rank of a command.
            finalizer.atexit = False
