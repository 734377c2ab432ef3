"""``mlaunch run --engine``: a command on the machines of an engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from mlaunch.caller.launch.settle import Steps
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.output_plan import STREAMS, OutputPlan, Policy
from mlaunch.cli import UsageError
from mlaunch.core.load import CallerParts
from mlaunch.engines.caller import engine_named
from mlaunch.engines.caller.engine import Engine
from mlaunch.engines.caller.engine_launch import Attempts, HostPrefix, Work
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.run.command.job import Job, OutputFlags, target_of

# Flags whose values an engine or its machines decide.
_DECIDED = (
    "node_rank", "master_addr", "master_port", "rdzv_endpoint", "devices", "preload", "dry_run", "standalone",
    "token_file",
)  # fmt: skip


def engine_of(args: argparse.Namespace) -> Engine | None:
    """Return the engine that the flags name. UsageError for flags that it does not allow."""
    if args.engine is None:
        return None
    for name in _DECIDED:
        if getattr(args, name):
            raise UsageError(f"--{name.replace('_', '-')} with --engine: the engine decides that; give one of the two")
    try:
        return engine_named(args.engine)
    except ValueError as error:
        raise UsageError(f"--engine {error}") from None


class EngineJob:
    """A job on machines of an engine, which ``close`` gives back."""

    def __init__(
        self, job: Job, engine: Engine, output_flags: OutputFlags, directory: str | None, tell: Callable[[str], None]
    ) -> None:
        self._job = job
        self._output_flags = output_flags
        self._directory, self._tell = directory, tell
        self._machines = engine.ask_for(job.nodes, None)
        self._work = Work(job.name, None, target_of(job, ""), (job.target, *job.args), job.path)

    def steps(self, parts: CallerParts) -> Steps:
        """Run the job; return how the last attempt ended."""
        made = Attempts(self._machines, _options(self._job), self._work, self._output, self._tell)
        return made.steps(parts, self._job.max_preemptions)

    def close(self) -> None:
        self._machines.close()

    def _output(self, _spec: LaunchSpec, hosts: dict[int, str]) -> OutputPlan:
        """Show all ranks, since none has this process's streams; files are named by global rank."""
        places = {rank: rank - machine.rank_start for machine in self._machines.machines for rank in machine.ranks}
        wished = self._output_flags.policies(max(places.values()) + 1)
        policies = {
            (rank, stream): wished.get((local_rank, stream), Policy(shown=True))
            for rank, local_rank in places.items()
            for stream in STREAMS
        }
        return OutputPlan(policies, self._prefix(hosts, places), self._directory, merge=False)

    def _prefix(self, hosts: dict[int, str], places: dict[int, int]) -> Callable[[Sequence[int]], str]:
        if not self._output_flags.own_prefix:
            return HostPrefix(hosts)
        return lambda ranks: self._output_flags.prefix_of(self._job.role, ranks[0], places[ranks[0]], hosts[ranks[0]])


def _options(job: Job) -> Options:
    counted = isinstance(job.size, str)
    device_type = "auto" if counted and job.size != "cpu" else "cpu"
    return job.asked.replaced({"n_gpus": None if counted else job.size, "device_type": device_type})
