"""From a job to the launch that runs it; ``--dry-run`` describes the same."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping

from mlaunch.base.linux import working_directory
from mlaunch.caller.launch.plan import Attempt, ThisMachine, plan
from mlaunch.cli.checks import UsageError
from mlaunch.protocol.spec import Context, LaunchSpec, Nodes, ScriptTarget
from mlaunch.run.command.job import Job


def spec_of(
    job: Job, size: int, machine: ThisMachine, environ: Mapping[str, str], attempt: Attempt, error_dir: str
) -> LaunchSpec:
    """Plans one attempt. ``size``: ranks on this machine; ``error_dir``: for ``record``'s files, "": the agent's own.

    Raises:
        ValueError: This machine cannot serve the job.
        UsageError: A feature that the flags ask for cannot.
    """
    planned = plan(job.options(size), machine, job.name, environ, attempt)
    command = ScriptTarget(
        kind=job.kind,
        target=job.target,
        args=job.args,
        role=job.role,
        run_id=job.run_id or planned.launch_id,
        error_dir=error_dir,
        temporary=tempfile.gettempdir(),
        virtual_local_rank=job.virtual_local_rank,
        source=job.source,
    )
    context = Context(environ, working_directory(), job.path, (job.target, *job.args), None, None, os.getpid())
    context = dataclasses.replace(context, source="mlaunch run")
    spec = dataclasses.replace(
        planned,
        device_type="",
        command=command,
        context=context,
        nodes=Nodes(job.node_rank, job.nodes, guessed=job.nodes > 1),
    )
    try:
        if attempt.parts is not None:
            attempt.parts.planned(spec)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return spec
