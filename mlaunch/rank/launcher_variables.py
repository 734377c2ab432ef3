"""The environment variables by which launchers name their ranks: ours, which are torchrun's, and those of others.

Torch and the libraries on it know a rank by them. Ranks that another launcher has started are recognised in this order,
each by variables that nothing else sets:

1. ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``: torchrun, and all that follow torch's convention;
2. ``SUBMITIT_EXECUTOR=local`` with ``SUBMITIT_LOCAL_GLOBALID`` and ``SUBMITIT_LOCAL_NTASKS``: a task of submitit's
   local executor (those of its Slurm executor are srun's);
3. ``SLURM_STEP_NUM_TASKS`` with ``SLURM_PROCID`` and ``SLURM_SRUN_COMM_PORT``: a task of srun (a batch script has
   ``SLURM_PROCID=0`` too, but is none), unless Open MPI's variables say otherwise: in an allocation, mpirun starts one
   daemon on each node by srun, whose variables all ranks there inherit;
4. ``OMPI_COMM_WORLD_RANK`` and ``OMPI_COMM_WORLD_SIZE``: a process of Open MPI's mpirun.

``MLAUNCH_JOIN=0`` turns recognition off. A process that a rank of mlaunch started is no rank, although it inherits the
variables of one.
"""

from __future__ import annotations

import os
import re
import subprocess
import zlib
from collections.abc import Mapping

from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol import token
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.rank import device

SWITCH = "MLAUNCH_JOIN"
OWNER = "MLAUNCH_RANK_PID"  # the process to which RANK and its like belong
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_SRUN_COMM_PORT")
_SUBMITIT = ("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_JOB_ID")
_OPENMPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
_LOOPBACK = "127.0.0.1"
_SCONTROL_TIMEOUT = 60.0  # seconds
_PORTS = (15000, 10000)  # the first, and how many: below those that the system gives to clients


# Ranks of mlaunch


def identity(
    rank: int, world_size: int, local_rank: int | None, local_world_size: int | None, address: str, port: object
) -> dict[str, str]:
    """Return the variables that every launcher sets, without those that are None."""
    known = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in known.items() if value is not None}


def of_rank(spec: LaunchSpec, local_rank: int, address: str, port: object) -> dict[str, str]:
    """Return the whole environment of a rank that runs a function."""
    from mlaunch.rendezvous import tcp_store  # which a caller does not need

    rank = spec.rank(local_rank)
    launch = {
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": spec.world_size,
        "GROUP_RANK": spec.nodes.rank,
        "GROUP_WORLD_SIZE": spec.nodes.count,
        "NODE_RANK": spec.nodes.rank,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": spec.restarts.count,
        "TORCHELASTIC_MAX_RESTARTS": spec.restarts.most,
        "TORCHELASTIC_RUN_ID": spec.launch_id,
        OWNER: os.getpid(),  # of RANK: a process that a rank starts inherits these, but is no rank
    }
    own = identity(rank, spec.world_size, local_rank, spec.local_world_size, address, port)
    # A rank needs no token, and all that it starts would have it. The caller's variable about torchrun's store is about
    # the launch that the caller is part of.
    left_out = {token.VARIABLE, tcp_store.HOSTED_BY_AGENT}
    theirs = {name: value for name, value in spec.context.environ.items() if name not in left_out}
    return {**theirs, **_defaults(spec, local_rank), **own, **{name: str(value) for name, value in launch.items()}}


def _defaults(spec: LaunchSpec, local_rank: int) -> dict[str, str]:
    from mlaunch.rendezvous import tcp_store  # which a caller does not need

    environ = spec.context.environ
    chosen = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    interface = spec.nodes.interface
    if interface:  # "lo" on one machine: NCCL takes the first interface by itself, where others reach its ranks
        chosen |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    found = {name: value for name, value in chosen.items() if name not in environ}
    if tcp_store.lacks_libuv:  # without this, torch's own store raises in all ranks then
        found[tcp_store.VARIABLE] = "0"
    if spec.devices.visible is not None and device.hides(spec.devices.type):
        runtime = device.runtime_of(spec.devices.type) or spec.devices.type
        found |= device.hiding(runtime, device.seen_by(local_rank, spec.devices.visible), environ)
    return found


# Ranks of other launchers


@frozen_record
class RankInfo:
    """A rank's place. ``local_rank`` and ``local_world_size`` are None if the launcher does not say."""

    launcher: str  # for people
    rank: int
    world_size: int
    host: str
    port: int
    local_rank: int | None = None
    local_world_size: int | None = None


def recognise(environ: Mapping[str, str]) -> RankInfo | None:
    """Return the place of this process; None if it was not started as a rank.

    Raises:
        RuntimeError: A variable of its launcher is missing or is no number, or does not say where rank 0 is.
    """
    switched_off = environ.get(SWITCH, "1").lower() in {"0", "off", "false", "no"}
    # What a rank starts inherits RANK and the like, but would join as a second process of that rank.
    if switched_off or environ.get(OWNER, str(os.getpid())) != str(os.getpid()):
        return None
    if environ.keys() >= set(_TORCH):
        return from_torch(environ)
    if environ.get("SUBMITIT_EXECUTOR") == "local" and environ.keys() >= set(_SUBMITIT):
        return from_submitit(environ)
    of_srun, of_mpirun = environ.keys() >= set(_SLURM), environ.keys() >= set(_OPENMPI)
    # A task of srun that has called MPI_Init has both, which agree; srun's say more.
    if of_srun and not (of_mpirun and _places(environ, _OPENMPI) != _places(environ, ("SLURM_PROCID", _SLURM[0]))):
        return from_slurm(environ)
    return from_openmpi(environ) if of_mpirun else None


def _places(environ: Mapping[str, str], names: tuple[str, ...]) -> list[str]:
    return [environ[name] for name in names]


def from_torch(environ: Mapping[str, str]) -> RankInfo:
    rank, size, port = (_number(environ, name, "torchrun") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    local = _optional(environ, "LOCAL_RANK"), _optional(environ, "LOCAL_WORLD_SIZE")
    launcher = "mlaunch run" if environ.get(OWNER) == str(os.getpid()) else "torchrun"
    return RankInfo(launcher, rank, size, _text(environ, "MASTER_ADDR", "torchrun"), port, *local)


def from_submitit(environ: Mapping[str, str]) -> RankInfo:
    """Read a task of submitit's local executor, all of whose tasks are on this machine."""
    rank = _number(environ, "SUBMITIT_LOCAL_GLOBALID", "submitit")
    size = _number(environ, "SUBMITIT_LOCAL_NTASKS", "submitit")
    host, port = _meeting_place(environ, "submitit", f"submitit {environ['SUBMITIT_LOCAL_JOB_ID']}", _LOOPBACK)
    return RankInfo("submitit", rank, size, host, port, rank, size)


def from_slurm(environ: Mapping[str, str], host: str | None = None, port: int | None = None) -> RankInfo:
    """Read srun's variables. ``host`` and ``port`` of rank 0: None as ``_meeting_place``."""
    rank = _number(environ, "SLURM_PROCID", "srun")
    step = "SLURM_STEP_NUM_TASKS" in environ
    size = _number(environ, "SLURM_STEP_NUM_TASKS" if step else "SLURM_NPROCS", "srun")
    nodes = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_NODELIST", ""))
    if host is None or port is None:
        job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
        alone = _optional(environ, "SLURM_STEP_NUM_NODES") == 1
        host, port = _meeting_place(environ, "srun", job, _LOOPBACK if alone else _first_of(nodes))
    # "2(x3),1": only where the nodes have equally many tasks is it known how many this one has.
    tasks = re.fullmatch(r"(\d+)(\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return RankInfo(
        "srun", rank, size, host, port, _optional(environ, "SLURM_LOCALID"), int(tasks[1]) if tasks else None
    )


def from_openmpi(environ: Mapping[str, str], host: str | None = None, port: int | None = None) -> RankInfo:
    """Read mpirun's variables. ``host`` and ``port`` of rank 0: None as ``_meeting_place``."""
    rank, size = _number(environ, "OMPI_COMM_WORLD_RANK", "mpirun"), _number(environ, "OMPI_COMM_WORLD_SIZE", "mpirun")
    local_rank = _optional(environ, "OMPI_COMM_WORLD_LOCAL_RANK")
    local_world_size = _optional(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    if host is None or port is None:
        job = environ.get("PMIX_NAMESPACE", environ.get("OMPI_MCA_ess_base_jobid", ""))
        host, port = _meeting_place(environ, "mpirun", job, _LOOPBACK if local_world_size == size else None)
    return RankInfo("mpirun", rank, size, host, port, local_rank, local_world_size)


def _meeting_place(environ: Mapping[str, str], launcher: str, job: str, host: str | None) -> tuple[str, int]:
    """Return ``MASTER_ADDR`` and ``MASTER_PORT``, or ``host`` and a port that all ranks derive from the job's name."""
    host = environ.get("MASTER_ADDR", host)
    if host is None:
        raise RuntimeError(
            f"{launcher} started this process on one of several machines, and does not say where rank 0 is: "
            f"set MASTER_ADDR to the address of rank 0 (and MASTER_PORT to a free port there)"
        )
    first, count = _PORTS
    port = _optional(environ, "MASTER_PORT")
    return host, first + zlib.crc32(job.encode()) % count if port is None else port


def _first_of(nodes: str) -> str | None:
    """Return the first of Slurm's list of nodes, which only Slurm can read: "gpu[03-07,11]"."""
    try:
        shown = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            capture_output=True,
            encoding="utf-8",
            check=True,
            timeout=_SCONTROL_TIMEOUT,
        )
    # Without scontrol (in a container, say) an error asks for MASTER_ADDR.
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.stdout.split()[0]


def _number(environ: Mapping[str, str], name: str, launcher: str) -> int:
    text = _text(environ, name, launcher)
    try:
        return int(text)
    except ValueError:
        raise RuntimeError(f"{name}={text!r} in the environment is not a whole number") from None


def _optional(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name, "") if name in environ else None


def _text(environ: Mapping[str, str], name: str, launcher: str) -> str:
    if name not in environ:
        wanted = {"torchrun": _TORCH, "srun": _SLURM, "submitit": _SUBMITIT, "mpirun": _OPENMPI}[launcher]
        found = [other for other in wanted if other in environ]
        raise RuntimeError(
            f"{name} is not set: was this process started by {launcher}? Of {', '.join(wanted)} the environment has "
            f"{', '.join(found) or 'none'}"
        )
    return environ[name]
