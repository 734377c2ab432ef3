"""Make a rank of a process that another launcher started: ColossalAI's ``launch`` functions, and MegEngine's.

``join`` takes all that a rank must know; the others read it from the environment. Every rank must call them, in its own
process; they return once all have.
"""

from __future__ import annotations

import os

from mlaunch.rank import launcher_variables
from mlaunch.rank.become_rank import become_rank
from mlaunch.rank.launcher_variables import SWITCH, RankInfo


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
    """Make this process a rank: device, process group, environment, seeds. Collective over all ranks.

    Joining, and each collective, may take half an hour.

    Args:
        rank: This process's rank, from 0.
        world_size: The number of ranks.
        host: Address or name of rank 0's machine; an IPv6 address with or without brackets.
        port: A free port there.
        backend: None: the device's own (nccl for cuda) plus gloo for CPU tensors. (ColossalAI ignores it.)
        local_rank: The number of its device. None: ``rank`` modulo the number of devices, which is right if all
            machines have as many.
        seed: For Python's, numpy's and torch's generators. A number: the same on all ranks. "per-rank": 1024 plus the
            rank; "per-rank:7": 7 plus the rank. None: do not seed.
        verbose: Rank 0 logs a line (logger "mlaunch", level INFO; on stderr if logging is not configured).

    Raises:
        RuntimeError: This process has a process group already, or not all ranks came.
        ValueError: A value that is not allowed, or a backend that this torch does not offer.
    """
    _check(rank, world_size, port)
    info = RankInfo("join()", rank, world_size, host.strip("[]"), port, local_rank)
    become_rank(info, backend=backend, seed=seed, verbose=verbose)


def join_from_torch(backend: str | None = None, seed: int | str | None = 1024, verbose: bool = True) -> None:
    """Join with torchrun's variables (``RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT``).

    Raises:
        RuntimeError: A variable is missing or not a number (the error names it); or as ``join``.
    """
    become_rank(launcher_variables.from_torch(os.environ), backend=backend, seed=seed, verbose=verbose)


def join_from_slurm(
    host: str, port: int, backend: str | None = None, seed: int | str | None = 1024, verbose: bool = True
) -> None:
    """Join in a task of srun (``SLURM_PROCID``, ``SLURM_STEP_NUM_TASKS`` or ``SLURM_NPROCS``, ``SLURM_LOCALID``).

    Raises:
        RuntimeError: A variable is missing or not a number (the error names it); or as ``join``.
    """
    become_rank(
        launcher_variables.from_slurm(os.environ, host.strip("[]"), port), backend=backend, seed=seed, verbose=verbose
    )


def join_from_openmpi(
    host: str, port: int, backend: str | None = None, seed: int | str | None = 1024, verbose: bool = True
) -> None:
    """Join in a process of Open MPI's mpirun (``OMPI_COMM_WORLD_RANK``, ``..._SIZE``, ``..._LOCAL_RANK``).

    Raises as ``join_from_slurm`` does.
    """
    become_rank(
        launcher_variables.from_openmpi(os.environ, host.strip("[]"), port), backend=backend, seed=seed, verbose=verbose
    )


def join_from_env(backend: str | None = None, seed: int | str | None = 1024, verbose: bool = True) -> None:
    """Join under the launcher that started this process: torchrun, submitit (its local executor), srun or mpirun.

    mlaunch looks for them in this order. If srun or mpirun do not say where rank 0 is, the address is ``MASTER_ADDR``,
    or loopback on one machine; the port is ``MASTER_PORT``, or one derived from the job's name. ``MLAUNCH_JOIN=0``
    turns recognition off.

    Raises:
        RuntimeError: No launcher is recognised, or recognition is off; and as ``join``.
    """
    info = launcher_variables.recognise(os.environ)
    if info is None:
        raise RuntimeError(
            f"this process was not started by torchrun, submitit, srun or mpirun, as far as its environment tells "
            f"({SWITCH}={os.environ.get(SWITCH, 'unset')}); start it with one of these, or call mlaunch.join()"
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
    """Join as ``join`` does, with MegEngine's parameters: ``device`` is this rank's device. Seeds nothing."""
    join(rank, world_size, master_ip, port, backend, device, seed=None, verbose=False)


def _check(rank: int, world_size: int, port: int) -> None:
    for name, value, lowest in (("rank", rank, 0), ("world_size", world_size, 1), ("port", port, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise ValueError(f"{name}={value!r}: allowed: whole numbers from {lowest}")
    if rank >= world_size:
        raise ValueError(f"rank={rank} with world_size={world_size}: allowed: 0 to {world_size - 1}")
