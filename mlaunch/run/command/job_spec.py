"""From a job to the launch that runs it; ``--dry-run`` describes the same."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping

from mlaunch.base.linux import working_directory
from mlaunch.caller.launch.plan import Attempt, ThisMachine, plan
from mlaunch.cli.parser import UsageError
from mlaunch.core import load
from mlaunch.protocol.spec import Context, LaunchSpec, Nodes, Target
from mlaunch.run.command.job import Job
from mlaunch.run.wire import Script


def spec_of(
    job: Job, size: int, machine: ThisMachine, environ: Mapping[str, str], attempt: Attempt, error_dir: str
) -> LaunchSpec:
    """Plan one attempt. ``size``: ranks on this machine; ``error_dir``: for ``record``'s files, "": the agent's own.

    Raises:
        ValueError: This machine cannot run the job.
        UsageError: A feature that the flags ask for refuses it.
    """
    try:
        if job.nodes > 1:
            load.room("machines", "caller", f"--nnodes {job.nodes}")  # otherwise the error would name world_size=
        planned = plan(job.options(size), machine, job.name, environ, attempt)
    except ModuleNotFoundError as error:  # of what several machines need
        raise UsageError(str(error)) from None
    target = target_of(job, error_dir)
    target = dataclasses.replace(target, run_id=job.run_id or planned.launch_id, temporary=tempfile.gettempdir())
    context = Context(environ, working_directory(), job.path, (job.target, *job.args), None, None, os.getpid())
    context = dataclasses.replace(context, source="mlaunch run")
    spec = dataclasses.replace(
        planned,
        devices=dataclasses.replace(planned.devices, type=""),
        target=target,
        context=context,
        nodes=Nodes(job.node_rank, job.nodes, guessed=job.nodes > 1),
    )
    try:
        if attempt.parts is not None:
            attempt.parts.planned(spec)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return spec


def target_of(job: Job, error_dir: str) -> Target:
    """Return what the ranks of a job run. ``error_dir``: as in ``spec_of``."""
    script = Script(job.kind, job.target, job.args, job.virtual_local_rank, job.source)
    return Target("run", script, job.role, job.run_id, error_dir, of_python=job.kind != "program")
