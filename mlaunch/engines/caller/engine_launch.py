"""One launch on an engine's machines, of a function or a command: where they meet, and all attempts of a call."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from mlaunch import features
from mlaunch.base.exceptions import LaunchError, LaunchTimeout, report_of
from mlaunch.base.linux import working_directory
from mlaunch.base.text import ranges
from mlaunch.caller.fork_server import in_memfds
from mlaunch.caller.launch.call import flush_streams, with_parts
from mlaunch.caller.launch.handle import LaunchHandle
from mlaunch.caller.launch.plan import Attempt, spec_of
from mlaunch.caller.launch.settle import Ended, Steps
from mlaunch.caller.launch.start import name_culprit, with_restarts
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.output_plan import OutputPlan, output_plan, with_directory
from mlaunch.caller.output.relay import Relay
from mlaunch.caller.report import notebook
from mlaunch.caller.report.launch_report import History
from mlaunch.caller.report.user_frames import warn_caller
from mlaunch.core import load
from mlaunch.core.load import CallerParts
from mlaunch.engines.caller.machines import Machine, PlacedMachines, say
from mlaunch.engines.caller.machines_requests import MachinesInspection
from mlaunch.engines.caller.merged_agent import MergedAgent, Patience
from mlaunch.engines.wire import AskOffer, Listen, Offer, Reach, Start
from mlaunch.protocol import calls, settings
from mlaunch.protocol import token as tokens
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import (
    Context,
    LaunchSpec,
    RankDevices,
    Target,
    details_of,
    new_launch_id,
)
from mlaunch.rendezvous.address import LOOPBACK

# Options that only this process uses, or that an engine decides.
_OURS = {
    "world_size", "rank_start", "master_ip", "port", "token", "output", "log_dir", "progress", "keep",
    "ranks", "engine", "machines", "max_restarts", "max_preemptions", "start_method", "join",
    *features.OPTIONS,
}  # fmt: skip
END_TIMEOUT = 2.0  # seconds for the last records of a launch, once its ranks have ended
M = TypeVar("M", bound=MergedAgent)
MakesPlan = Callable[[LaunchSpec, dict[int, str]], OutputPlan]
_ANSWER_TIMEOUT = 60.0  # seconds for machines to answer; some may be busy


class AllServers:
    """The machines and the thread that listens to them, in the place of a handle's fork server."""

    silence = "one of its machines did not answer (was something stopped there?), and all were given back"

    def __init__(self, machines: PlacedMachines, merged: MergedAgent) -> None:
        self._machines = machines
        self._merged = merged

    def kill(self) -> None:
        self._machines.kill()

    def describe_end(self) -> str:
        return "the thread that listens to the machines has ended (a bug in mlaunch?)"

    def close(self) -> None:
        """Wait for the last records of all machines, after the handle was closed."""
        if not self._merged.join(END_TIMEOUT):
            self._machines.kill()
            self._merged.join(END_TIMEOUT)


class _MachinesHandle(LaunchHandle):
    """The handle of a MergedAgent. Members have started the agents, and report when they end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._has_begun = True


@dataclass(frozen=True)
class Work:
    """The work of the ranks. ``argv`` and ``path``: their ``sys.argv``, and ``sys.path`` after the machine's own.

    ``surroundings``: this process's at the time of the request; None: those of now.
    """

    name: str
    call: Call | None
    target: Target | None = None
    argv: tuple[str, ...] = field(default_factory=lambda: tuple(sys.argv))
    path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    surroundings: Context | None = None


@dataclass
class MachinesLaunch:
    """A launch on an engine's machines. ``output``: plans the ranks' output, given their hosts by rank."""

    placed: PlacedMachines
    options: Options
    work: Work
    output: MakesPlan
    number: Attempt

    def steps(self) -> Steps:
        """Run the launch to its end; see ``call_on_machines``."""
        handle, servers = self.start_it()
        try:
            if self.number.parts is not None:
                handle.attach(self.number.parts)
            return (yield from handle.drive())
        finally:
            handle.close()
            servers.close()

    def start_it(self) -> tuple[LaunchHandle, AllServers]:
        """Make the machines start the launch. Drive the returned handle to its end, then close it and the servers."""
        spec, history = self._begin()
        merged = self._merged(MergedAgent, spec, spec.seconds)
        relay = Relay(self.output(spec, history.hosts), spec.world_size, self.number.restart_count, ends_come=True)
        servers = AllServers(self.placed, merged)
        handle = _MachinesHandle(spec, servers, merged.channel, relay, history)
        handle.outcome.hosts, handle.seen_as = history.hosts, merged.inspection.launch.launch_id
        merged.start()
        return handle, servers

    def _begin(self) -> tuple[LaunchSpec, History]:
        """Make the machines start the launch; return its spec and history."""
        history = History()
        tell = say if self.options.progress else lambda _text: None
        self.placed.open(self.options.join_timeout, lambda state: tell(f"{self.work.name} waits: {state}"))
        self.placed.ask_offers(self._question(), self.options.join_timeout)
        machines = self.placed.machines
        spec = self._spec([machine.offer for machine in machines])
        if self.number.parts is not None:
            self.number.parts.planned(spec)
        meet_at = self._master_ip(machines[0].offer)
        history.ready = time.monotonic()
        history.hosts = {rank: machine.host for machine in machines for rank in machine.ranks}
        call = self.work.call
        try:
            with in_memfds([("call", call)] if call is not None else []) as memfds:
                for machine in machines:
                    machine.stream.send(self._start(spec, machine, meet_at), memfds[0] if memfds else -1)
        except Exception as error:
            name_culprit(error, call, spec.call.name)
            raise
        return spec, history

    def _merged(self, kind: type[M], spec: LaunchSpec, deadline: float | None) -> M:
        machines = self.placed.machines
        times = Patience(spec.grace_period + END_TIMEOUT, deadline, self.placed.heartbeat_timeout)
        # Another ID: if this machine is one of them, its part of the launch is listed, too.
        inspection = MachinesInspection(replace(spec, launch_id=new_launch_id()), machines)
        merged = kind(machines, spec.world_size, self.placed.end_of, times, inspection)
        merged.parts = self.number.parts
        return merged

    def _question(self) -> AskOffer:
        given = {known.name: getattr(self.options, known.name) for known in fields(self.options)}
        theirs = {name: value for name, value in given.items() if name not in _OURS}
        theirs["env"] = dict(self.options.env) if self.options.env is not None else None
        around = self.work.surroundings
        cwd = working_directory() if around is None else around.cwd
        return AskOffer(theirs, self.work.name, cwd, self.work.path)

    def _start(self, spec: LaunchSpec, machine: Machine, meet_at: str) -> Start:
        """Return a machine's order to start; the machines meet at ``meet_at``."""
        head = self.placed.machines[0].offer
        return Start(
            world_size=spec.world_size,
            rank_start=machine.rank_start,
            master_ip=meet_at,
            port=self.options.port or head.port,
            token=spec.secret,
            restart_count=self.number.restart_count,
            details=details_of(spec),
            target=self.work.target,
            node_rank=machine.place,
            num_nodes=len(self.placed.machines),
            sections=spec.sections,
            stays=spec.launch_id if spec.stays else "",
        )

    def _context(self) -> Context:
        """Return the parts of this process's surroundings that machines need to know."""
        work, around = self.work, self.work.surroundings
        if around is not None:
            known = settings.without_the_machines(around.settings)
            return Context({}, "", (), around.argv, None, None, os.getpid(), known, around.source)
        known = () if work.target is not None else settings.of_the_program()
        source = notebook.source() if work.target is None else "mlaunch run"
        return Context({}, "", (), work.argv, None, None, os.getpid(), known, source)

    def _master_ip(self, head: Offer) -> str:
        """Return the address where machines meet: the option's, or loopback for one machine, or the first one's."""
        if self.options.master_ip != "localhost":
            return self.options.master_ip.strip("[]")
        networks = {machine.offer.identity for machine in self.placed.machines}
        return LOOPBACK if len(networks) == 1 else address_for_all(self.placed, self.options.port or head.port)

    def _spec(self, offers: Sequence[Offer]) -> LaunchSpec:
        """Return the spec of the launch as this process sees it: one machine with all ranks."""
        size, devices = sum(one.local_world_size for one in offers), _devices(offers)
        spec = spec_of(
            self.options,
            self.work.name,
            self.number,
            size,
            RankDevices(offers[0].device_type, devices),
            self._context(),
            offers[0].torch_version,
        )
        # A random token is long enough to be used without scrypt.
        sections = load.sections_of(self.options, self.number.parts)
        return replace(spec, secret=tokens.draw(), target=self.work.target, sections=sections)


def with_hosts(plan: OutputPlan, hosts: dict[int, str]) -> OutputPlan:
    """Return a plan whose prefixes of lines name the ranks' hosts, if there are several."""
    return replace(plan, prefix=HostPrefix(hosts, plan.trial)) if len(set(hosts.values())) > 1 else plan


@dataclass
class HostPrefix:
    """A prefix of lines with ranks and their hosts: "[n1:0-3,n2:4] "."""

    hosts: dict[int, str]
    trial: str = ""  # of a sweep

    def __call__(self, ranks: Sequence[int]) -> str:
        found: dict[str, list[int]] = {}
        for rank in sorted(ranks):
            found.setdefault(self.hosts[rank], []).append(rank)
        named = [f"{host}:{ranges(there, ',')}" for host, there in found.items()]
        return f"[{self.trial}{' ' * bool(self.trial)}{','.join(named)}] "


def _devices(offers: Sequence[Offer]) -> str:
    """Return the names of all ranks' devices on their machines, separated by commas."""
    return ",".join(one.visible_devices or ",".join(map(str, range(one.local_world_size))) for one in offers)


def address_for_all(placed: PlacedMachines, port: int) -> str:
    """Return an address of the first machine that all others reach. The machine listens at ``port`` meanwhile.

    A machine may have addresses that other machines cannot reach: a bridge for containers, a network for storage.
    The machines' part is in ``mlaunch/engines/member/member.py``.

    Raises:
        LaunchError: There is no such address.
    """
    if not placed.meets_at:
        placed.meets_at = _tried(placed, port)
    return placed.meets_at


def _tried(placed: PlacedMachines, port: int) -> str:
    first, *others = placed.machines
    offered = first.offer.addresses
    if not placed.ask([first], Listen(port), _ANSWER_TIMEOUT)[0].listens:  # taken, as its agent will report
        return offered[0]
    told = [one.failures for one in placed.ask(others, Reach(offered, port), _ANSWER_TIMEOUT)]
    placed.ask([first], Listen(None), _ANSWER_TIMEOUT)
    for address, *failures in zip(offered, *told, strict=True):
        if not any(failures):
            return str(address)
    # The error names the machine that reached least: look at that one first.
    cut = max(range(len(others)), key=lambda number: sum(map(bool, told[number])))
    tried = ", ".join(f"{address} ({words})" for address, words in zip(offered, told[cut], strict=True) if words)
    raise LaunchError(
        f"host {others[cut].host} does not reach host {first.host} at port {port}: tried {tried}; is there a "
        f"firewall between them? Open the port, choose one that is open (port=), or say where others find the first "
        f"machine (master_ip=)"
    )


class Attempts:
    """The attempts of one call, or of a command. ``tell``: gets the reason for another attempt.

    Failed attempts, and attempts whose machines were preempted, are counted separately.
    """

    def __init__(
        self, machines: PlacedMachines, options: Options, work: Work, output: MakesPlan, tell: Callable[[str], None]
    ) -> None:
        self._machines, self._options, self._work, self._output = machines, options, work, output
        self._tell = tell
        self._begun = 0  # attempts
        self._preempted = False  # the machines of the last one were taken

    def steps(self, parts: CallerParts, most: int) -> Steps:
        """Return how the last attempt ended. ``most``: how often preempted machines may be replaced."""
        self._parts, self._most = parts, most
        begun, left = time.monotonic(), self._options.deadline
        for number in range(most + 1):
            again = left, self._options.max_restarts, self._tell
            ended = yield from with_restarts(self._attempt, self._work.name, *again, parts, lambda: self._preempted)
            if not self._preempted or number == most:
                break
            count = f"preemption {number + 1} of at most {most}"
            self._tell(f"{self._work.name} starts again on other machines ({count}): the scheduler has taken these")
            # All of them: the other machines of a preempted job end with it.
            self._machines.close()
            if self._options.deadline is not None:
                left = max(0.0, self._options.deadline - (time.monotonic() - begun))
        return ended

    def _attempt(self, number: Attempt) -> Steps:
        self._machines.renew()
        number = dataclasses.replace(number, restart_count=self._begun)
        made = MachinesLaunch(self._machines, self._options, self._work, self._output, number)
        self._begun += 1
        ended = yield from made.steps()
        self._preempted = self._may_start_anew(ended) and self._machines.preempted()
        return ended

    def _may_start_anew(self, ended: Ended) -> bool:
        """True if the attempt was stopped or has failed, and nobody here has asked for its end."""
        if not self._most or self._parts.is_last():
            return False
        stopped = ended.report().stopped
        if ended.error is None:
            return stopped is not None and stopped.reason != "asked"
        report = report_of(ended.error) if isinstance(ended.error, Exception) else None
        return report is not None and not isinstance(report, LaunchTimeout)


def call_on_machines(
    machines: PlacedMachines,
    options: Options,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Ended:
    """Run the function on the ranks of all machines; return how the last attempt ended."""
    name = f"{getattr(function, '__qualname__', type(function).__qualname__)}()"
    work = Work(name, Call(calls.portable(function), args, kwargs))
    options = with_directory(options, name)
    # So that this process's earlier output comes before the ranks'.
    flush_streams()

    def output(spec: LaunchSpec, hosts: dict[int, str]) -> OutputPlan:
        return with_hosts(output_plan(options, spec), hosts)

    attempts = Attempts(machines, options, work, output, warn_caller)
    return with_parts(options, lambda parts: attempts.steps(parts, options.max_preemptions))
