"""The text of ``mlaunch run --dry-run``."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping

from mlaunch.base.text import ranges
from mlaunch.protocol.spec import LaunchSpec, Nodes
from mlaunch.rank.launcher_variables import OWNER
from mlaunch.rank.setup import device
from mlaunch.run.command.job import AT_THE_START, Job
from mlaunch.run.rank import environ_of

_OWN = "TORCHELASTIC_ERROR_FILE"  # differs between ranks although it names no rank


def describe(job: Job, spec: LaunchSpec, environ: Mapping[str, str], runtime: str | None = None) -> str:
    """Return the plan, for people. ``environ``: the caller's. ``runtime`` None: unknown, so CUDA's rules apply."""
    asked, size, first, world = job.asked, spec.local_world_size, spec.rank_start, spec.world_size
    ranks = [_environment(job, spec, local_rank, environ, runtime) for local_rank in range(size)]
    shared = {name: value for name, value in ranks[0].items() if all(rank.get(name) == value for rank in ranks)}
    shared = {name: value for name, value in shared.items() if not _is_of_one(name)}
    lines = [
        f"command     {_command(job)}",
        f"directory   {job.path[0] if job.path else ''} comes first in sys.path",
        f"ranks       {ranges(range(first, first + size), ', ')} of {world}{_guess(job, size)}",
        f"machines    {_machines(job)}",
        f"devices     {_devices(job, environ)}",
        f"threads     {_threads(size, environ)}",
        f"ending      SIGTERM, after {asked.grace_period:g} s SIGKILL; {asked.max_restarts} restarts; {_deadline(job)}",
        "",
        "environment of every rank:",
        *(f"  {name}={value}" for name, value in sorted(shared.items())),
        "",
        "and of each:",
    ]
    for rank in ranks:
        lines.append("  " + " ".join(f"{name}={value}" for name, value in rank.items() if name not in shared))
    return "\n".join(lines)


def _guess(job: Job, size: int) -> str:
    """Return the assumption about other machines, whose ranks are known only at the start."""
    return f", if each machine has {size}" if job.nodes > 1 else ""


def _environment(
    job: Job, spec: LaunchSpec, local_rank: int, environ: Mapping[str, str], runtime: str | None
) -> dict[str, str]:
    """Return the rank's variables that the caller's environment does not have."""
    if spec.target is None:
        return {}
    port = job.port if job.nodes == 1 and job.port else AT_THE_START
    nodes = Nodes(job.node_rank, job.nodes, interface="lo" if job.nodes == 1 else AT_THE_START)
    known = dataclasses.replace(spec, nodes=nodes)
    found = environ_of(known, spec.target, local_rank, ("127.0.0.1", port), runtime)
    found.setdefault("OMP_NUM_THREADS", str(device.threads_of(spec.local_world_size)))
    del found[OWNER]  # the rank's own process
    return {name: value for name, value in found.items() if environ.get(name) != value or name == "OMP_NUM_THREADS"}


def _is_of_one(name: str) -> bool:
    """True for a rank's own variable: a single rank shares all others with itself."""
    return name in {"RANK", "LOCAL_RANK", "ROLE_RANK", _OWN}


def _command(job: Job) -> str:
    before = {"file": ["python"], "module": ["python", "-m"], "program": [], "function": ["python: call"]}[job.kind]
    return " ".join([*before, shlex.join([job.target, *job.args])])


def _machines(job: Job) -> str:
    if job.nodes == 1:
        return f"only this one; ranks meet at 127.0.0.1, {f'port {job.port}' if job.port else 'a free port'}"
    secret = "with a token" if job.token else "without a token"
    role = "which this one opens" if job.node_rank == 0 else "to which this one connects"
    return f"{job.nodes}, this is number {job.node_rank}; they meet at {job.host}, port {job.port}, {role}, {secret}"


def _devices(job: Job, environ: Mapping[str, str]) -> str:
    variables = [f"{name}={value}" for name, value in environ.items() if name.endswith("_VISIBLE_DEVICES")]
    if job.virtual_local_rank:
        return "each rank sees only its own"
    return f"every rank sees those of {' '.join(variables)}" if variables else "every rank sees all"


def _threads(size: int, environ: Mapping[str, str]) -> str:
    if "OMP_NUM_THREADS" in environ:
        return f"OMP_NUM_THREADS={environ['OMP_NUM_THREADS']}"
    return f"{device.threads_of(size)} for each rank"


def _deadline(job: Job) -> str:
    return "no deadline" if job.asked.deadline is None else f"all within {job.asked.deadline:g} s"
