"""``mlaunch run``: a command on every rank, from one interpreter that imports torch once.

This process is the launcher: it plans, starts the interpreter that forks agent and ranks, passes signals on, and
reports how the command ended. It does not import torch, and little before it asks for that interpreter; ``run_job`` has
the rest.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from mlaunch.base import own_process
from mlaunch.caller.fork_server import ForkServer, Interpreter, start_interpreter
from mlaunch.caller.interrupts import EndSignal
from mlaunch.cli import UsageError
from mlaunch.core import load
from mlaunch.run.command.ending import FAILED, MISUSE, SIGNALLED, errors, fail, say
from mlaunch.run.command.flags import parser as parser
from mlaunch.run.command.job import Job, OutputFlags, behind_the_script, job_of, output_flags_of, with_source

if TYPE_CHECKING:
    import argparse

    from mlaunch.engines.caller.engine import Engine


def main(argv: Sequence[str], *, prog: str = "mlaunch run", of_launch: bool = False) -> int:
    """Run the command line; return the exit status. ``of_launch``: that of torch.distributed.launch."""
    flags = parser(prog)
    flags.set_defaults(use_env=True)
    if of_launch:
        help_ = "do not pass --local-rank=N to the script, which reads LOCAL_RANK instead"
        flags.add_argument("--use-env", "--use_env", action="store_true", default=False, help=help_)
    args = flags.parse_args(argv)
    try:
        errors.check(args.error_file)
        errors.begin(args.error_file)
        job, output_flags, engine = _job_of(args), output_flags_of(args, os.environ), _engine_of(args)
        with _stopping_at(job.signals):
            job = job if args.dry_run else with_source(job)
            if engine is not None:
                from mlaunch.run.command.run_job import run_there

                return run_there(job, output_flags, engine)
            status = _run(job, output_flags, dry=args.dry_run)
            # argparse's status: the script's parser may have refused a flag that was meant for mlaunch run.
            if status == MISUSE and (flag := behind_the_script(job.args)):
                say(
                    f"{flag} comes after {job.target}, so the script got it: put flags of mlaunch run before the script"
                )
            return status
    except UsageError as error:
        flags.exit(MISUSE, f"{prog}: {error}\n")
    except OSError as error:
        own_process.name_limit(error)
        fail(str(error), FAILED)
        return FAILED
    except EndSignal as stop:
        fail("\n".join([f"ended by {stop}", *getattr(stop, "__notes__", [])]), -stop.number)
        return SIGNALLED + stop.number
    finally:
        _let_go_of_streams()


def _job_of(args: argparse.Namespace) -> Job:
    job = job_of(args, os.environ)
    if getattr(args, "lease", None) is None:  # the flag exists if its feature does
        return job
    checked: Job = load.module_of("leases", "command").check(args, job)
    return checked


def _engine_of(args: argparse.Namespace) -> Engine | None:
    """Return the engine that the flags name; only then import engines."""
    if args.engine is None:
        return None
    try:
        load.room("engines", "caller", f"--engine {args.engine}")
    except ModuleNotFoundError as error:
        raise UsageError(str(error)) from None
    from mlaunch.run.command.run_on_engine import engine_of

    return engine_of(args)


def _run(job: Job, output_flags: OutputFlags, *, dry: bool) -> int:
    handled = ",".join(signal.Signals(number).name for number in job.signals)
    environ = {**os.environ, "TORCHELASTIC_SIGNALS_TO_HANDLE": handled}
    like = Interpreter(_executable(environ), job.path, job.preload, stdin=None)
    uncounted = isinstance(job.size, int) and job.devices is None
    server = None if dry and uncounted else _server(like, environ)
    try:
        from mlaunch.run.command import run_job

        if server is not None and not dry:
            return run_job.run_here(job, server, environ, output_flags)
        return run_job.describe_here(job, server, environ)
    finally:
        if server is not None:
            server.close()


def _executable(environ: Mapping[str, str]) -> str:
    """Return the interpreter for the ranks, from torchrun's variable."""
    executable = environ.get("PYTHON_EXEC", sys.executable)
    if shutil.which(executable) is None:
        raise UsageError(f"PYTHON_EXEC {executable}: no such program, or it is not executable")
    return executable


def _server(like: Interpreter, environ: Mapping[str, str]) -> ForkServer:
    """Return a fork server of a feature, such as ``mlaunch warm``, or start one."""
    try:
        return load.server_at_hand(environ, like) or start_interpreter(environ, like)
    except (ValueError, ModuleNotFoundError) as error:
        raise UsageError(str(error)) from None


@contextlib.contextmanager
def _stopping_at(numbers: Sequence[int]) -> Iterator[None]:
    """Raise EndSignal in the main thread when one of these signals comes."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise EndSignal(number)

    # A signal that was ignored when this command started (nohup) stays ignored.
    wanted = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _let_go_of_streams() -> None:
    """Redirect streams whose reader has left (``| head``), so that the interpreter's last flush does not fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (AttributeError, ValueError):  # None, closed
            continue
