"""The run of a job: planned, started, and its end reported.

The command imports this after it has asked for the fork server, which gets ready meanwhile.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mlaunch.base.exceptions import LaunchError, LaunchTimeout
from mlaunch.base.linux import working_directory
from mlaunch.base.log import tell_curious
from mlaunch.base.text import ranges
from mlaunch.caller import interrupts
from mlaunch.caller.fork_server import ForkServer
from mlaunch.caller.launch.plan import Accelerator, Attempt, ThisMachine, plan, shown
from mlaunch.caller.launch.settle import Steps
from mlaunch.caller.launch.start import start_launch, with_restarts
from mlaunch.caller.report.launch_report import History
from mlaunch.cli import UsageError
from mlaunch.core import load
from mlaunch.core.load import CallerParts
from mlaunch.protocol.server_messages import Ready
from mlaunch.protocol.spec import Context, LaunchSpec, Nodes
from mlaunch.rank import device
from mlaunch.run.command.ending import FAILED, STOPPED, TIMED_OUT, annotate, fail, say, status_of
from mlaunch.run.command.flags import as_flag
from mlaunch.run.command.job import AT_THE_START, Job, OutputFlags, directory_of, output_plan, target_of, without_output

if TYPE_CHECKING:
    from mlaunch.engines.caller.engine import Engine


Attempts = Callable[[CallerParts], Steps]  # all attempts of a job; returns how the last one ended
# A rank's own variables: a single rank shares all others with itself.
_OF_ONE_RANK = {"RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_ERROR_FILE"}


def spec_of(
    job: Job, size: int, machine: ThisMachine, environ: Mapping[str, str], attempt: Attempt, error_dir: str
) -> LaunchSpec:
    """Plan one attempt. ``size``: ranks on this machine; ``error_dir``: as in ``target_of``.

    Raises:
        UsageError: This machine, or a feature that the flags ask for, refuses the job.
    """
    try:
        if job.nodes > 1:
            load.room("machines", "caller", f"--nnodes {job.nodes}")  # otherwise the error would name world_size=
        planned = plan(job.options(size), machine, job.name, environ, attempt)
    except (ValueError, ModuleNotFoundError) as error:  # the latter: of what several machines need
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


def run_here(job: Job, server: ForkServer, environ: dict[str, str], output_flags: OutputFlags) -> int:
    """Run the job on this machine; return the exit status."""
    try:
        with _parts_of(job) as parts:
            if job.lease is None:
                return _carry_out(job, _on_its_devices(job, server, environ, output_flags, ()), parts)
            job, granted = load.module_of("leases", "command").take(job, server, environ, say)
            try:
                attempts = _on_its_devices(job, server, dict(granted.environ), output_flags, granted.held)
                return _carry_out(job, attempts, parts)
            finally:
                granted.give_back()
    except LaunchError as error:
        return _failed(error)


def _parts_of(job: Job) -> CallerParts:
    """Return the parts of the features that the flags ask for. UsageError if this machine refuses one."""
    try:
        return CallerParts(job.options(1), as_flag)
    except OSError as error:
        raise UsageError(error.strerror) from None
    except ModuleNotFoundError as error:  # a feature that is not installed, or what it needs
        raise UsageError(str(error)) from None


def _failed(error: LaunchError) -> int:
    return _fail(error, TIMED_OUT if isinstance(error, LaunchTimeout) else None)


def _on_its_devices(
    job: Job, server: ForkServer, environ: dict[str, str], output_flags: OutputFlags, held: Sequence[int]
) -> Attempts:
    """Check the devices, and return a function that makes the attempts of a job on them."""
    size, environ = _on_devices(job, server, environ)
    if job.virtual_local_rank:
        _check_devices(size, environ, server.ready().runtime)
    if job.asked.numa is None:  # otherwise only the ranks know their CPUs
        _say_threads(size, environ)
    return _attempts_here(job, size, server, environ, output_flags, held)


def run_there(job: Job, output_flags: OutputFlags, engine: Engine) -> int:
    """Run the job on an engine's machines; return the exit status."""
    from mlaunch.run.command.run_on_engine import EngineJob

    size = job.size if isinstance(job.size, int) else 1
    engine_job = EngineJob(job, engine, output_flags, _directory(output_flags, size, job), say)
    try:
        with _parts_of(job) as parts:
            return _carry_out(job, engine_job.steps, parts)
    except LaunchError as error:
        return _fail(error)
    except ValueError as error:
        raise UsageError(str(error)) from None
    finally:
        engine_job.close()


def _attempts_here(
    job: Job, size: int, server: ForkServer, environ: Mapping[str, str], output_flags: OutputFlags, held: Sequence[int]
) -> Attempts:
    """Return a function that makes the attempts of a job on this machine."""
    directory = _directory(output_flags, size, job)
    machine = ThisMachine(server.ready(), server.count_devices)

    def attempts(parts: CallerParts) -> Steps:
        def attempt(number: Attempt) -> Steps:
            spec = spec_of(job, size, machine, environ, number, directory or "")
            output = output_plan(output_flags, size, job.role, directory, lambda: handle.outcome.spec.rank_start)
            handle = start_launch(server, spec, None, output, History(), held)
            try:
                handle.attach(parts)
                return (yield from handle.drive())
            finally:
                handle.close()

        return with_restarts(attempt, job.name, job.asked.deadline, job.asked.max_restarts, say, parts)

    return attempts


def _directory(output_flags: OutputFlags, size: int, job: Job) -> str | None:
    directory = directory_of(output_flags, size, job.run_id or "run")
    if directory is not None and output_flags.log_dir is None:
        say(f"output is kept in {directory}")
    if said := without_output(output_flags, size):
        say(said)
    return directory


def _carry_out(job: Job, attempts: Attempts, parts: CallerParts) -> int:
    """Make the attempts; return the exit status of a job that has ended well or was late."""
    begun = time.monotonic()
    try:
        with parts.around():
            ended = interrupts.carry_out(attempts(parts))
            parts.settled(ended, say)
            ended.result()
    except LaunchTimeout as error:  # of the deadline, or of the time to join
        late = job.asked.deadline is not None and time.monotonic() - begun >= job.asked.deadline
        return _fail(error, TIMED_OUT if late else FAILED)
    stopped = ended.report().stopped
    if stopped is None:
        return 0
    fail(f"{job.name} {stopped}", STOPPED)
    return STOPPED


def _on_devices(job: Job, server: ForkServer, environ: dict[str, str]) -> tuple[int, dict[str, str]]:
    """Return the number of ranks, and the environment that shows only the wanted devices."""
    ready = server.ready(job.asked.deadline)
    count = 0
    if job.devices is not None or job.size in {"auto", "gpu", "xpu"}:
        count = server.count_devices(environ) if ready.accelerator else 0
    if job.devices is not None:
        if not ready.accelerator:
            raise UsageError(f"--devices: torch {ready.torch_version} is built for CPUs only")
        try:
            accelerator = Accelerator(ready.accelerator, ready.runtime or ready.accelerator, count)
            environ |= shown(accelerator, job.devices, environ)
        except ValueError as error:
            raise UsageError(f"--{error}") from None
        count = len(job.devices)
    if isinstance(job.size, int):
        return job.size, environ
    if job.size in {"gpu", "xpu"} and count == 0:
        raise UsageError(f"--nproc-per-node {job.size}: no device is visible here (torch {ready.torch_version})")
    size = count if job.size != "cpu" and count else device.usable_cpus()
    return size, environ


def _check_devices(size: int, environ: Mapping[str, str], runtime: str | None) -> None:
    try:
        device.only(size - 1, environ, runtime)
    except ValueError as error:
        raise UsageError(f"--virtual-local-rank with {size} ranks: {error}") from None


def _say_threads(size: int, environ: Mapping[str, str]) -> None:
    """Print, for users who want details, how many threads each rank has."""
    cpus = device.usable_cpus()
    if size > 1 and "OMP_NUM_THREADS" not in environ:
        tell_curious(
            f"OMP_NUM_THREADS is not set: each of the {size} ranks gets {device.threads_of(size)} of {cpus} CPUs"
        )


def _fail(error: LaunchError, status: int | None = None) -> int:
    """Report how the launch failed; return the exit status: ``status``, or that of its kind."""
    ends_with = status_of(error) if status is None else status
    fail(str(error), FAILED if status is None else status, error, ends_with)
    annotate(error)
    return ends_with


# The plan that ``--dry-run`` prints


def spec_to_describe(job: Job, size: int, environ: Mapping[str, str]) -> LaunchSpec:
    """Return the launch as far as it is known before the start, from the code that plans real ones."""
    # Nothing is known of torch and devices: no process is started.
    nothing_known = ThisMachine(Ready("", None, ("gloo",)), lambda _environ: 0)
    spec = spec_of(job, size, nothing_known, environ, Attempt(0, job.asked.deadline), AT_THE_START)
    if spec.target is None or job.run_id:
        return spec
    return dataclasses.replace(spec, target=dataclasses.replace(spec.target, run_id=AT_THE_START))


def describe_here(job: Job, server: ForkServer | None, environ: dict[str, str]) -> int:
    """Print the plan; ``server`` None: nothing has to be counted. Return the exit status."""
    try:
        if server is None and isinstance(job.size, int):
            print(describe(job, spec_to_describe(job, job.size, environ), environ))
        elif server is not None:
            size, environ = _on_devices(job, server, environ)
            print(describe(job, spec_to_describe(job, size, environ), environ, server.ready().runtime))
    except LaunchError as error:
        return _failed(error)
    return 0


def describe(job: Job, spec: LaunchSpec, environ: Mapping[str, str], runtime: str | None = None) -> str:
    """Return the plan, for people. ``environ``: the caller's. ``runtime`` None: unknown, so CUDA's rules apply."""
    asked, size, first, world = job.asked, spec.local_world_size, spec.rank_start, spec.world_size
    ranks = [_environment(job, spec, local_rank, environ, runtime) for local_rank in range(size)]
    shared = {name: value for name, value in ranks[0].items() if all(rank.get(name) == value for rank in ranks)}
    shared = {name: value for name, value in shared.items() if name not in _OF_ONE_RANK}
    guess = f", if each machine has {size}" if job.nodes > 1 else ""  # the others' ranks are known only at the start
    lines = [
        f"command     {_command(job)}",
        f"directory   {job.path[0] if job.path else ''} comes first in sys.path",
        f"ranks       {ranges(range(first, first + size), ', ')} of {world}{guess}",
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


def _environment(
    job: Job, spec: LaunchSpec, local_rank: int, environ: Mapping[str, str], runtime: str | None
) -> dict[str, str]:
    """Return the rank's variables that the caller's environment does not have."""
    from mlaunch.rank.launcher_variables import OWNER  # late: a run here does not need them
    from mlaunch.run.rank import environ_of

    if spec.target is None:
        return {}
    port = job.port if job.nodes == 1 and job.port else AT_THE_START
    nodes = Nodes(job.node_rank, job.nodes, interface="lo" if job.nodes == 1 else AT_THE_START)
    known = dataclasses.replace(spec, nodes=nodes)
    found = environ_of(known, spec.target, local_rank, ("127.0.0.1", port), runtime)
    found.setdefault("OMP_NUM_THREADS", str(device.threads_of(spec.local_world_size)))
    del found[OWNER]  # the rank's own process
    return {name: value for name, value in found.items() if environ.get(name) != value or name == "OMP_NUM_THREADS"}


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
