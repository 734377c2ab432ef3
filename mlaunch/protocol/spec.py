"""What a launch is, on one machine: written by the launcher, read by agent and ranks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.settings import Settings


def new_launch_id() -> str:
    """Return one that no other launch has."""
    return os.urandom(6).hex()


@frozen_record
class Context:
    """The caller's surroundings at the moment of the call; the fork server's own are older."""

    environ: Mapping[str, str]
    cwd: str
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    main_file: str | None  # __main__.__file__
    main_name: str | None  # of the module that python -m runs
    caller: int  # its pid
    settings: Settings = ()
    source: str = ""  # what has called, for people: "train.py", "In[3] of tour.ipynb"
    authkey: bytes = field(default=b"", repr=False)  # of its multiprocessing, with which managers know their own
    of_call: tuple[str, ...] = ()  # variables that only the call knows, and no launch that was prepared for it
    given: str = ""  # the arguments of a call that goes on by itself, for people: "lr=0.1, width=64"


@frozen_record
class Target:
    """What ranks run in place of a function that a call brings.

    ``feature``: whose ``rank.py`` has the rank that runs it; ``work``: what that feature knows of it.
    """

    feature: str
    work: Any
    role: str
    run_id: str
    error_dir: str  # for the files that torch's ``record`` writes; "": one of the agent's own, in ``temporary``
    temporary: str = "/tmp"
    of_python: bool = True  # False: of what its ranks become, no stacks can be asked for
    role_start: int | None = None  # of local rank 0 among all ranks with this role; None: its global rank
    role_size: int | None = None  # the number of those; None: all ranks


@frozen_record
class Agreed:
    """What the machines of a launch agree on when all have joined, as one of them hears it."""

    launch_id: str
    attempt: int  # from 0
    node_rank: int
    num_nodes: int
    rank_start: int
    world_size: int
    role_start: int  # as in Target
    role_size: int
    secret: str = field(repr=False)  # drawn for this launch


@frozen_record
class Rendezvous:
    """How the machines of a launch find each other. Times in seconds. ``token``: the key that was made of it."""

    master_ip: str
    port: int
    token: str | None = field(repr=False)
    join_timeout: float
    heartbeat_timeout: float
    by_engine: bool = False  # whose caller hears all machines; else each has a caller of its own
    store_limit: int | None = None  # bytes; None: no bound


@frozen_record
class Nodes:
    """Which of its launch's machines this one is, and how it reaches the others."""

    rank: int = 0
    count: int = 1
    guessed: bool = False  # so are rank_start and world_size, until all machines have told their sizes
    interface: str = "lo"  # on which the ranks talk; "": not known


@frozen_record
class RankDevices:
    """What the ranks of one machine run on, one each."""

    type: str  # "": what a command does with devices is not known
    visible: str | None = None  # as the machine names them, with commas; None: there are none to choose from
    backend: str = ""


@frozen_record
class Restarts:
    """How often a call was started again before this attempt, and how often it may be."""

    count: int
    most: int


@frozen_record
class CallFacts:
    """What of a launch may be known only with its call, for which its ranks wait. Times in seconds."""

    name: str  # for people: "train()", or a command, "train.py"
    deadline: float | None  # as the user gave it
    time_left: float | None = None  # of the deadline, when this attempt begins; None: all of it
    seed: int | str | None = None  # see mlaunch.seeding
    rank0_only: bool = False  # the caller wants the value of rank 0 alone


@frozen_record
class Details:
    """What of a launch may be known only with its call; see LaunchSpec."""

    call: CallFacts
    argv: tuple[str, ...]
    settings: Settings = ()
    source: str = ""
    given: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)  # more variables of its ranks
    held: int = 0  # descriptors that its processes are to hold


@frozen_record
class LaunchSpec:
    """One launch on one machine, as agent and workers need it. Times in seconds, None = no limit."""

    launch_id: str
    call: CallFacts
    local_world_size: int
    world_size: int
    rank_start: int
    devices: RankDevices
    timeout: float | None
    grace_period: float
    restarts: Restarts
    port: int  # of the rendezvous; 0: chosen by the system
    torch_version: str
    secret: str = field(repr=False)  # signs what ranks pickle for each other
    context: Context
    cluster: Rendezvous | None = None  # None: a launch on this machine alone
    nodes: Nodes = field(default_factory=Nodes)
    prepared: bool = False  # before its call: the ranks wait for it, and learn the details with it
    stays: bool = False  # the ranks stay between calls, which are sent one after the other
    target: Target | None = None  # None: ranks receive a function
    sections: Mapping[str, object] = field(default_factory=dict)  # by feature: what its parts elsewhere need
    piped: tuple[tuple[int, ...], ...] = ()  # by local rank: the streams that go to the launcher in pipes

    @property
    def callers_signals(self) -> tuple[int, ...]:
        """Return the signals that are for a feature's part in the caller: its section's ``signals``."""
        return tuple(number for section in self.sections.values() for number in getattr(section, "signals", ()))

    @property
    def seconds(self) -> float | None:
        """Return what is left of the deadline when this attempt begins."""
        return self.call.deadline if self.call.time_left is None else self.call.time_left

    def device(self, local_rank: int) -> str:
        """Return "cpu", or the device as the machine numbers it, "cuda:2"; "" where that is not known."""
        if self.devices.type in {"cpu", ""}:
            return self.devices.type
        shown = self.devices.visible.split(",") if self.devices.visible else []
        return f"{self.devices.type}:{shown[local_rank] if shown else local_rank}"

    def streams(self, local_rank: int) -> tuple[int, ...]:
        return self.piped[local_rank] if self.piped else ()

    def called(self, **facts: Any) -> LaunchSpec:
        """Return it with other facts of its call."""
        return dataclasses.replace(self, call=dataclasses.replace(self.call, **facts))

    def rank(self, local_rank: int) -> int:
        return self.rank_start + local_rank


def details_of(spec: LaunchSpec, held: int = 0) -> Details:
    """Return a launch's details. ``held``: descriptors that its processes are to hold."""
    context = spec.context
    environ = {name: context.environ[name] for name in context.of_call}
    return Details(spec.call, context.argv, context.settings, context.source, context.given, environ, held)


def with_details(spec: LaunchSpec, details: Details) -> LaunchSpec:
    """Return the launch with these details."""
    bare = {name: value for name, value in spec.context.environ.items() if name not in spec.context.of_call}
    own = {name: getattr(details, name) for name in ("argv", "settings", "source", "given")}
    environ, of_call = {**bare, **details.environ}, tuple(details.environ)
    context = dataclasses.replace(spec.context, environ=environ, of_call=of_call, **own)
    return dataclasses.replace(spec, call=details.call, context=context)


def shape_of(spec: LaunchSpec) -> LaunchSpec:
    """Return the launch less its details and what is its own: of two that are equal then, one can serve the other."""
    bare = with_details(spec, Details(CallFacts("", None), ()))
    return dataclasses.replace(bare, launch_id="", secret="")
