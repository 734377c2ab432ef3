"""``mlaunch run --lease``: a command waits for devices; and the leases in ``mlaunch ps``."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlaunch.base.text import in_two_units, shown
from mlaunch.cli import UsageError, at_least

if TYPE_CHECKING:
    from mlaunch.caller.fork_server import ForkServer
    from mlaunch.core.records import Grant
    from mlaunch.run.command.job import Job


def check(args: argparse.Namespace, job: Job) -> Job:
    """Return the job with the flag's value in it. UsageError for flags that do not go together."""
    if args.lease is None:
        return job
    at_least(1, "--lease", args.lease)
    if job.nodes > 1 or args.engine:
        raise UsageError(f"--lease {args.lease} with --nnodes or --engine: leases are of one machine's devices")
    if job.devices is not None and args.lease > len(job.devices):
        raise UsageError(f"--lease {args.lease} with --devices {args.devices}: allowed: up to {len(job.devices)}")
    return dataclasses.replace(job, lease=args.lease, size=args.lease if args.nproc_per_node is None else job.size)


def take(job: Job, server: ForkServer, environ: dict[str, str], tell: Callable[[str], None]) -> tuple[Job, Grant]:
    """Return the job on its leased devices, and the grant; at once for a job without a lease."""
    from mlaunch.caller.launch.call import acquired  # which most commands do not need
    from mlaunch.caller.options.launch_options import Options
    from mlaunch.core.load import CallerParts
    from mlaunch.core.records import Grant

    options = Options(n_gpus=job.lease, devices=job.devices if job.lease else None, lease=job.lease is not None)
    try:
        with CallerParts(options) as parts:
            grant = acquired(parts, Grant(options, environ), server, job.name, tell)
    except ValueError as error:
        raise UsageError(f"--lease {job.lease}: {error}") from None
    if grant.options.devices is not None:
        job = dataclasses.replace(job, devices=tuple(grant.options.devices))
    return job, grant


def rows(environ: Mapping[str, str]) -> list[str]:
    """Return lines about held devices and waiting launches; none if there are none."""
    from mlaunch.leases.caller.acquisition import standing
    from mlaunch.leases.caller.lease_directory import place

    held, waiting = shown(standing(place(environ)))
    found = ["leases"] if held or waiting else []
    found += [f"  {one['device']}  {_who(one)}" for one in held]
    for one in waiting:
        over = ": it has stopped, and is passed over" if one.get("stopped") else ""
        found.append(f"  {_who(one, ', waits')} for {_wanted(one.get('count', 1), one['names'])}{over}")
    return found


def _who(one: Mapping[str, Any], does: str = ", for") -> str:
    return f"{one.get('who') or '?'} of pid {one.get('pid', '?')}{does} {_age(one)}".rstrip()


def _age(one: Mapping[str, Any]) -> str:
    return in_two_units(max(0.0, time.time() - one["since"])) if "since" in one else ""


def _wanted(count: int, names: Sequence[str]) -> str:
    return names[0] if count == len(names) == 1 else f"{count} of {', '.join(names)}"
