"""What ``mlaunch run --dry-run`` prints."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from mlaunch.cli.job import Job
from mlaunch.rank import device


def describe(job: Job, size: int, environ: Mapping[str, str]) -> str:
    """The plan, for people. ``environ``: the ranks' own, as far as it is known before they start."""
    first, world = job.node_rank * size, size * job.nodes
    lines = [
        f"command     {_command(job)}",
        f"directory   {job.path[0] if job.path else ''} comes first in sys.path",
        f"ranks       {first}-{first + size - 1} of {world}" if size > 1 else f"ranks       {first} of {world}",
        f"machines    {_machines(job)}",
        f"devices     {_devices(job, environ)}",
        f"threads     {_threads(size, environ)}",
        f"ending      SIGTERM, after {job.grace_period:g} s SIGKILL; {job.max_restarts} restarts; {_deadline(job)}",
        "",
        "environment of every rank:",
        *(f"  {name}={value}" for name, value in _shared(job, size, environ).items()),
        "",
        "and of each:",
    ]
    for local_rank in range(size):
        rank = first + local_rank
        shown = 0 if job.virtual_local_rank else local_rank
        only = device.only(local_rank, environ, None) if job.virtual_local_rank else {}
        own = {"RANK": rank, "LOCAL_RANK": shown, "ROLE_RANK": rank, **only}
        lines.append("  " + " ".join(f"{name}={value}" for name, value in own.items()))
    return "\n".join(lines)


def _command(job: Job) -> str:
    before = {"file": ["python"], "module": ["python", "-m"], "program": [], "function": ["python: call"]}[job.kind]
    return " ".join([*before, shlex.join([job.target, *job.args])])


def _machines(job: Job) -> str:
    if job.nodes == 1:
        return f"this one alone; ranks meet at 127.0.0.1, {f'port {job.port}' if job.port else 'a free port'}"
    secret = "with a token" if job.token else "without a token"
    role = "which this one opens" if job.node_rank == 0 else "to which this one connects"
    return f"{job.nodes}, this is number {job.node_rank}; they meet at {job.host}, port {job.port}, {role}, {secret}"


def _devices(job: Job, environ: Mapping[str, str]) -> str:
    variables = [f"{name}={value}" for name, value in environ.items() if name.endswith("_VISIBLE_DEVICES")]
    if job.virtual_local_rank:
        return "each rank sees its own alone"
    return f"every rank sees those of {' '.join(variables)}" if variables else "every rank sees all"


def _threads(size: int, environ: Mapping[str, str]) -> str:
    if "OMP_NUM_THREADS" in environ:
        return f"OMP_NUM_THREADS={environ['OMP_NUM_THREADS']}"
    return f"{device.threads_of(size)} for each rank"


def _deadline(job: Job) -> str:
    return "no deadline" if job.deadline is None else f"all within {job.deadline:g} s"


def _shared(job: Job, size: int, environ: Mapping[str, str]) -> dict[str, object]:
    return {
        "LOCAL_WORLD_SIZE": size,
        "WORLD_SIZE": size * job.nodes,
        "GROUP_RANK": job.node_rank,
        "GROUP_WORLD_SIZE": job.nodes,
        "ROLE_NAME": job.role,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": job.port if job.nodes == 1 and job.port else "(chosen at the start)",
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", device.threads_of(size)),
        "TORCHELASTIC_MAX_RESTARTS": job.max_restarts,
        "TORCHELASTIC_RUN_ID": job.run_id or "(chosen at the start)",
    }
