"""From a job to the launch that runs it; ``--dry-run`` describes the same."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping

from mlaunch.caller.launch.plan import Attempt, ThisMachine, plan, working_directory
from mlaunch.caller.server.fork_server import ForkServer
from mlaunch.caller.server.start_server import Interpreter, start_interpreter
from mlaunch.caller.server.zygote_client import ask_zygote
from mlaunch.cli.checks import UsageError
from mlaunch.cli.job import Job
from mlaunch.protocol.spec import Context, LaunchSpec, ScriptTarget


def spec_of(
    job: Job, size: int, machine: ThisMachine, environ: Mapping[str, str], attempt: Attempt, error_dir: str
) -> LaunchSpec:
    """Plans one attempt. ``size``: ranks on this machine; ``error_dir``: for ``record``'s files, "": the agent's own.

    Raises:
        ValueError: This machine cannot serve the job.
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
        numa_binding=job.numa_binding,
    )
    context = Context(environ, working_directory(), job.path, (job.target, *job.args), None, None, os.getpid())
    context = dataclasses.replace(context, source="mlaunch run")
    return dataclasses.replace(
        planned,
        device_type="",
        command=command,
        context=context,
        node_rank=job.node_rank,
        num_nodes=job.nodes,
        count_machines=job.nodes > 1,
    )


def interpreter_of(environ: Mapping[str, str]) -> str:
    """Returns the one that runs the ranks; torchrun's variable."""
    executable = environ.get("PYTHON_EXEC", sys.executable)
    if shutil.which(executable) is None:
        raise UsageError(f"PYTHON_EXEC {executable}: no such program, or it is not executable")
    return executable


def server_for(job: Job, executable: str, environ: Mapping[str, str]) -> ForkServer:
    """Returns a fork of what ``mlaunch warm`` keeps, if that will do, or a fresh interpreter."""
    like = Interpreter(executable, job.path, job.preload, stdin=None)
    try:
        return ask_zygote(environ, like) or start_interpreter(environ, like)
    except ValueError as error:
        raise UsageError(str(error)) from None
