"""The description of a launch on one machine: written by the launcher, read by agent and ranks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.settings import Settings


def new_launch_id() -> str:
    """Return an ID that no other launch has."""
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
    caller: int  # the caller's pid
    settings: Settings = ()
    source: str = ""  # where the call was made, for people: "train.py", "In[3] of tour.ipynb"
    authkey: bytes = field(default=b"", repr=False)  # of its multiprocessing, by which managers recognize their own
    of_call: tuple[str, ...] = ()  # variables that only the call knows, and no launch that was prepared for it
    given: str = ""  # the arguments of a call that continues by itself, for people: "lr=0.1, width=64"


@frozen_record
class Target:
    """The work of ranks in place of a function that a call brings.

    ``feature``: its ``rank.py`` has the rank that does the work; ``work``: the feature's own description of it.
    """

    feature: str
    work: Any
    role: str
    run_id: str
    error_dir: str  # for the files that torch's ``record`` writes; "": one of the agent's own, in ``temporary``
    temporary: str = "/tmp"
    of_python: bool = True  # False: its ranks become programs that cannot be asked for stacks
    role_start: int | None = None  # the rank of local rank 0 among all ranks with this role; None: its global rank
    role_size: int | None = None  # the number of ranks with this role; None: all ranks


@frozen_record
class Agreed:
    """The facts that the machines of a launch agree on when all have joined, as one of them receives them."""

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
    by_engine: bool = False  # one caller receives from all machines; else each machine has a caller of its own
    store_limit: int | None = None  # bytes; None: no bound


@frozen_record
class Nodes:
    """The place of this machine in its launch, and how it reaches the other machines."""

    rank: int = 0
    count: int = 1
    guessed: bool = False  # rank_start and world_size are guesses, too, until all machines have sent their sizes
    interface: str = "lo"  # on which the ranks talk; "": unknown


@frozen_record
class RankDevices:
    """The devices of one machine's ranks, one each."""

    type: str  # "": it is unknown what a command does with devices
    visible: str | None = None  # as the machine names them, with commas; None: there are none to choose from
    backend: str = ""


@frozen_record
class Restarts:
    """How often a call was started again before this attempt, and how often it may be."""

    count: int
    most: int


@frozen_record
class CallFacts:
    """Facts about a launch that may be unknown until its call comes. Times in seconds."""

    name: str  # for people: "train()", or a command, "train.py"
    deadline: float | None  # as the user gave it
    time_left: float | None = None  # of the deadline, when this attempt begins; None: all of it
    seed: int | str | None = None  # see mlaunch.seeding
    rank0_only: bool = False  # the caller wants only the value of rank 0


@frozen_record
class Details:
    """The details of a launch that may be unknown until its call comes; see LaunchSpec."""

    call: CallFacts
    argv: tuple[str, ...]
    settings: Settings = ()
    source: str = ""
    given: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)  # more variables of its ranks
    held: int = 0  # how many descriptors its processes must hold


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
    port: int  # of the rendezvous; 0: the system chooses it
    torch_version: str
    secret: str = field(repr=False)  # signs what ranks pickle for each other
    context: Context
    cluster: Rendezvous | None = None  # None: a launch on this machine only
    nodes: Nodes = field(default_factory=Nodes)
    prepared: bool = False  # the launch starts before its call: the ranks wait for it, and get the details with it
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
        """Return the seconds that are left of the deadline when this attempt begins."""
        return self.call.deadline if self.call.time_left is None else self.call.time_left

    def device(self, local_rank: int) -> str:
        """Return "cpu", or the device with the machine's number for it, "cuda:2"; "" if it is unknown."""
        if self.devices.type in {"cpu", ""}:
            return self.devices.type
        shown = self.devices.visible.split(",") if self.devices.visible else []
        return f"{self.devices.type}:{shown[local_rank] if shown else local_rank}"

    def streams(self, local_rank: int) -> tuple[int, ...]:
        return self.piped[local_rank] if self.piped else ()

    def called(self, **facts: Any) -> LaunchSpec:
        """Return a copy with other facts about its call."""
        return dataclasses.replace(self, call=dataclasses.replace(self.call, **facts))

    def rank(self, local_rank: int) -> int:
        return self.rank_start + local_rank


def details_of(spec: LaunchSpec, held: int = 0) -> Details:
    """Return a launch's details. ``held``: how many descriptors its processes must hold."""
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
    """Return the launch without its details and identity.

    If two shapes are equal, one launch can serve for the other.
    """
    bare = with_details(spec, Details(CallFacts("", None), ()))
    return dataclasses.replace(bare, launch_id="", secret="")
