"""A process that something else started becomes a rank: ColossalAI's ``launch`` functions.

``join`` takes all that a rank must know; the others read it from the environment. All must be called by every rank,
each in its own process; they return once all have.
"""

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
from mlaunch.rank.for_users import current_device
from mlaunch.rank.joining import recognise
from mlaunch.rank.joining.recognise import RankInfo
from mlaunch.rank.setup import device, environment, group
from mlaunch.rendezvous import tcp_store
from mlaunch.rendezvous.address import is_taken
from mlaunch.torch_parts import process_groups

if TYPE_CHECKING:
    import torch.distributed as dist

_TIMEOUT = 1800.0
_ANSWER_TIMEOUT = 60.0  # seconds, for a server that listens, and may still be importing torch


def join(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int | str | None = 1024,
    verbose: bool = True,
) -> None:
    """Makes this process a rank: device, process group, environment, seeds. Collective, over all ranks.

    Joining, and each collective, may take half an hour.

    Args:
        rank: This process's rank, from 0.
        world_size: How many there are.
        host: Address or name of rank 0's machine; IPv6 with or without brackets.
        port: A free port there.
        backend: None: the device's own (nccl for cuda) plus gloo for CPU tensors. (ColossalAI ignores it.)
        local_rank: Which device to take. None: ``rank`` modulo the number of devices, as if all machines had as many.
        seed: For Python's, numpy's and torch's generators. A number: the same on all ranks. "per-rank": 1024 plus the
            rank; "per-rank:7": 7 plus the rank. None: leave them alone.
        verbose: Rank 0 logs a line (logger "mlaunch", level INFO; on stderr if logging is not configured).

    Raises:
        RuntimeError: This process is in a process group already; or not all ranks came.
        ValueError: A value that is not allowed, or a backend that this torch does not offer.
    """
    _check(rank, world_size, port)
    info = RankInfo("join()", rank, world_size, host.strip("[]"), port, local_rank)
    become_rank(info, backend=backend, seed=seed, verbose=verbose)


def join_from_torch(backend: str | None = None, seed: int | str | None = 1024, verbose: bool = True) -> None:
    """Joins, with what torchrun says (``RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT``).

    Raises:
        RuntimeError: A variable is missing (it is named) or no number; and as ``join``.
    """
    become_rank(recognise.from_torch(os.environ), backend=backend, seed=seed, verbose=verbose)


def join_from_slurm(
    host: str, port: int, backend: str | None = None, seed: int | str | None = 1024, verbose: bool = True
) -> None:
    """Joins, in a task of srun (``SLURM_PROCID``, ``SLURM_STEP_NUM_TASKS`` or ``SLURM_NPROCS``, ``SLURM_LOCALID``).

    Raises:
        RuntimeError: A variable is missing (it is named) or no number; and as ``join``.
    """
    become_rank(recognise.from_slurm(os.environ, host.strip("[]"), port), backend=backend, seed=seed, verbose=verbose)


def join_from_openmpi(
    host: str, port: int, backend: str | None = None, seed: int | str | None = 1024, verbose: bool = True
) -> None:
    """Joins, in a process of Open MPI's mpirun (``OMPI_COMM_WORLD_RANK``, ``..._SIZE``, ``..._LOCAL_RANK``).

    Raises what ``join_from_slurm`` does.
    """
    become_rank(recognise.from_openmpi(os.environ, host.strip("[]"), port), backend=backend, seed=seed, verbose=verbose)


def join_from_env(backend: str | None = None, seed: int | str | None = 1024, verbose: bool = True) -> None:
    """Joins, under whichever launcher started this process: torchrun, submitit (its local executor), srun, mpirun,
    looked for in this order.

    Where srun and mpirun do not say where rank 0 is, ``MASTER_ADDR`` does, or on one machine loopback; ``MASTER_PORT``,
    or a port drawn from the job's name. ``MLAUNCH_JOIN=0`` turns recognition off.

    Raises:
        RuntimeError: No launcher is recognised, or recognition is off; and as ``join``.
    """
    info = recognise.recognise(os.environ)
    if info is None:
        raise RuntimeError(
            f"this process was not started by torchrun, submitit, srun or mpirun, as far as its environment tells "
            f"({recognise.SWITCH}={os.environ.get(recognise.SWITCH, 'unset')}); start it so, or call mlaunch.join()"
        )
    become_rank(info, backend=backend, seed=seed, verbose=verbose)


def init_process_group(
    master_ip: str,
    port: int,
    world_size: int,
    rank: int,
    device: int,
    backend: str | None = None,
) -> None:
    """Joins as ``join`` does, in MegEngine's words: ``device`` is the number of this rank's device. Seeds nothing."""
    join(rank, world_size, master_ip, port, backend, device, seed=None, verbose=False)


def become_rank(
    info: RankInfo,
    *,
    backend: str | None = None,
    seed: int | str | None = None,
    verbose: bool = False,
    timeout: float | None = _TIMEOUT,
) -> None:
    """Makes this process the rank that ``info`` describes. Raises as ``join``."""
    import torch
    import torch.distributed as dist

    seeding.check(seed)
    if dist.is_initialized():
        raise RuntimeError(f"this process is rank {dist.get_rank()} of a process group already; it can join only one")
    offered = device.offered()
    accelerator = offered.accelerator if torch.accelerator.is_available() else None
    chosen = device.choose_backend(backend, accelerator or "cpu", offered)
    device_of_rank = current_device.device_at(info, accelerator)
    if accelerator is not None:  # before the group is made: NCCL ties itself to the current device
        torch.accelerator.set_device_index(device_of_rank.index)
    _complete_environment(info)
    store = _meet(info, timeout)
    group.join_world(store, group.Membership(info.rank, info.world_size, chosen, timeout, device_of_rank))
    # A gloo group that the interpreter's end destructs may wait for its threads for ever.
    atexit.register(leave)
    current_device.note_device(device_of_rank)
    if seed is not None:
        seeding.apply(seeding.of_rank(seed, info.rank))
    if verbose and info.rank == 0:
        where = f"{_in_brackets(info.host)}:{info.port}"
        _say(f"joined {info.world_size} ranks ({chosen}) at {where}, started by {info.launcher}")


def _meet(info: RankInfo, timeout: float | None) -> dist.Store:
    """Returns the store of the ranks, which rank 0 hosts; under torchrun its agent may, and a ``Server`` anywhere."""
    import torch.distributed as dist

    limit = device.limit(timeout)
    url = "env://" if info.launcher == "torchrun" else f"tcp://{_in_brackets(info.host)}:{info.port}"
    # Asked first: torch's own server would raise that the address is in use, or wait for a client that is none.
    if info.rank == 0 and url != "env://" and is_taken(info.port):
        store = _store_that_is_there(info, limit)
    else:
        store = tcp_store.rendezvous(url, info.rank, info.world_size, limit)
    # Only now: the store that was found may have been made with another.
    store.set_timeout(limit)
    # As torch's own, so that ranks without mlaunch find it. A server may see several worlds, one after the other.
    before = store.add(f"mlaunch/worlds/of rank {info.rank}", 1) - 1
    return dist.PrefixStore(f"default_pg/{before}" if before else "default_pg", store)


def _store_that_is_there(info: RankInfo, limit: timedelta) -> dist.Store:
    """Connects to the server that listens at rank 0's port, in a thread: torch would wait for a silent one for ever."""
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
        f"rank 0 cannot host the ranks' store at port {info.port}, which is taken, and what listens there is no "
        f"mlaunch.Server either; give a free port, or the one of a server"
    )


def _complete_environment(info: RankInfo) -> None:
    """Sets what libraries look for and the launcher left out."""
    known = environment.identity(
        info.rank, info.world_size, info.local_rank, info.local_world_size, info.host, info.port
    )
    for name, value in {**known, recognise.OWNER: str(os.getpid())}.items():
        # What the launcher has set stays: others may have read it.
        os.environ.setdefault(name, value)


def _in_brackets(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def leave() -> None:
    """Leaves the group that this process has joined, if it has not left yet."""
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


def _check(rank: int, world_size: int, port: int) -> None:
    for name, value, lowest in (("rank", rank, 0), ("world_size", world_size, 1), ("port", port, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise ValueError(f"{name}={value!r}: allowed: whole numbers from {lowest}")
    if rank >= world_size:
        raise ValueError(f"rank={rank} with world_size={world_size}: allowed: 0 to {world_size - 1}")
