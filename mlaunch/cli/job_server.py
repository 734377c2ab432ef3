"""The fork server of ``mlaunch run``: the interpreter that it is to be, and where it comes from."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping

from mlaunch.caller.server.fork_server import ForkServer
from mlaunch.caller.server.start_server import Interpreter, start_interpreter
from mlaunch.caller.server.zygote_client import ask_zygote
from mlaunch.cli.checks import UsageError
from mlaunch.cli.job import Job


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
