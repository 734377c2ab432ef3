"""A process that another launcher started becomes a rank, and leaves the ranks."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import queue
import sys
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

from mlaunch.base import seeding
from mlaunch.base.log import is_heard, log
from mlaunch.rank import device, for_users, group, launcher_variables
from mlaunch.rank.launcher_variables import RankInfo
from mlaunch.rendezvous import tcp_store
from mlaunch.rendezvous.address import is_taken
from mlaunch.torch_parts import process_groups

if TYPE_CHECKING:
    import torch.distributed as dist

_TIMEOUT = 1800.0
_ANSWER_TIMEOUT = 60.0  # seconds, for a server that listens, and may still be importing torch


def become_rank(
    info: RankInfo,
    *,
    backend: str | None = None,
    seed: int | str | None = None,
    verbose: bool = False,
    timeout: float | None = _TIMEOUT,
) -> None:
    """Make this process the rank that ``info`` describes. Raises as ``join``."""
    import torch
    import torch.distributed as dist

    seeding.check(seed)
    if dist.is_initialized():
        raise RuntimeError(f"this process is rank {dist.get_rank()} of a process group already; it can join only one")
    offered = device.offered()
    accelerator = offered.accelerator if torch.accelerator.is_available() else None
    chosen = device.choose_backend(backend, accelerator or "cpu", offered)
    device_of_rank = for_users.device_at(info, accelerator)
    if accelerator is not None:  # before the group is made: NCCL ties itself to the current device
        torch.accelerator.set_device_index(device_of_rank.index)
    _complete_environment(info)
    store = _meet(info, timeout)
    group.join_world(store, group.Membership(info.rank, info.world_size, chosen, timeout, device_of_rank))
    # A gloo group that is destructed at the interpreter's end may wait for its threads for ever.
    atexit.register(leave)
    for_users.note_device(device_of_rank)
    if seed is not None:
        seeding.apply(seeding.of_rank(seed, info.rank))
    if verbose and info.rank == 0:
        where = f"{_in_brackets(info.host)}:{info.port}"
        _say(f"joined {info.world_size} ranks ({chosen}) at {where}, started by {info.launcher}")


def _meet(info: RankInfo, timeout: float | None) -> dist.Store:
    """Return the store of the ranks, hosted by rank 0, by a ``Server``, or by torchrun's agent."""
    import torch.distributed as dist

    limit = device.limit(timeout)
    url = "env://" if info.launcher == "torchrun" else f"tcp://{_in_brackets(info.host)}:{info.port}"
    # Checked first: torch's own server would raise that the address is in use, or wait for a client that never comes.
    if info.rank == 0 and url != "env://" and is_taken(info.port):
        store = _store_that_is_there(info, limit)
    else:
        store = tcp_store.rendezvous(url, info.rank, info.world_size, limit)
    # The store that was found may have another timeout.
    store.set_timeout(limit)
    # Torch's own prefix, so that ranks without mlaunch meet us. A server may serve several worlds, one after the other.
    before = store.add(f"mlaunch/worlds/of rank {info.rank}", 1) - 1
    return dist.PrefixStore(f"default_pg/{before}" if before else "default_pg", store)


def _store_that_is_there(info: RankInfo, limit: timedelta) -> dist.Store:
    """Connect to the server that listens at rank 0's port, in a thread: torch would wait for a silent one for ever."""
    import torch.distributed as dist

    seconds = min(limit.total_seconds(), _ANSWER_TIMEOUT)
    answers: queue.SimpleQueue[dist.Store | dist.DistError] = queue.SimpleQueue()

    def connect() -> None:
        try:
            answers.put(tcp_store.connect(info.host, info.port, timedelta(seconds=seconds)))
        except dist.DistError as error:
            answers.put(error)

    # A daemon: torch's client cannot be interrupted, and this process may end meanwhile.
    threading.Thread(target=connect, name="mlaunch-connect", daemon=True).start()
    with contextlib.suppress(queue.Empty):
        found = answers.get(timeout=seconds)
        if isinstance(found, dist.Store):
            return found
    raise RuntimeError(
        f"rank 0 cannot host the ranks' store: port {info.port} is taken, and no mlaunch.Server listens there; give a "
        f"free port, or the port of a server"
    )


def _complete_environment(info: RankInfo) -> None:
    """Set the variables that libraries read and the launcher has not set."""
    known = launcher_variables.identity(
        info.rank, info.world_size, info.local_rank, info.local_world_size, info.host, info.port
    )
    for name, value in {**known, launcher_variables.OWNER: str(os.getpid())}.items():
        os.environ.setdefault(name, value)  # the launcher's own stay: libraries may have read them


def _in_brackets(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def leave() -> None:
    """Leave the group that this process has joined, if it has not left yet."""
    import torch.distributed as dist

    if dist.is_initialized():
        if device.version() < group.DESTRUCTIBLE:
            for member in process_groups.everyone():
                # Never to be destructed: before this release its destructor held the interpreter lock while it waited
                # for threads that may want it, and some ranks never ended.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(member))
        with contextlib.suppress(RuntimeError):  # another rank died
            dist.destroy_process_group()


def _say(text: str) -> None:
    if is_heard():
        log.info(text)
    else:
        print(f"mlaunch: {text}", file=sys.stderr, flush=True)
