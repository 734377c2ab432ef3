"""The options of a launch. Each is stated once, as a field of ``Options``: name, type, default, values, meaning, flag.

The signature of ``launcher``, its documentation and the checks are made from these fields (``option_text``). What must
be written elsewhere (``option_types``, the flags of the command) is held to them by ``tests/unit/test_options.py``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, fields
from datetime import timedelta
from typing import Any, cast

from mlaunch.base.frozen_record import frozen_record
from mlaunch.caller.options import trouble_options
from mlaunch.caller.options.call_targets import PlacesRanks, TakesCalls
from mlaunch.caller.options.option_checks import HIGHEST_PORT, check_together
from mlaunch.caller.options.option_values import (
    About,
    AnEngine,
    Choice,
    Devices,
    Directory,
    FilePath,
    FromTo,
    Leasing,
    Listener,
    Name,
    Seconds,
    Secret,
    Seed,
    Signals,
    SomeRanks,
    Staying,
    Switch,
    Variables,
    Whole,
    WordOrCpus,
    option,
)
from mlaunch.caller.options.trouble_options import StallLimit
from mlaunch.features import Feature, asked_for


def about(name: str) -> About:
    """Says what the field of this name says."""
    return cast(About, Options.__dataclass_fields__[name].metadata["about"])


@frozen_record
class Options:
    """What ``launcher`` takes besides the function. Those before ``KW_ONLY`` also by position."""

    n_gpus: int | None = option(
        None,
        Whole(1, optional=True),
        "Ranks on this machine; on CPUs any number. None: one per visible accelerator; where there is none, "
        "one per CPU that this process may use.",
        flag="--nproc-per-node",
    )
    world_size: int | None = option(
        None,
        Whole(1, optional=True),
        "Ranks on all machines (the flag: how many of these). None: ``n_gpus``.",
        flag="--nnodes",
    )
    rank_start: int = option(
        0, Whole(0), "The first rank of this machine (the flag: which machine this is, from 0).", flag="--node-rank"
    )
    master_ip: str = option("localhost", Name(), "The address of the machine with rank 0.", flag="--master-addr")
    port: int = option(
        0, Whole(0, HIGHEST_PORT), "The port of the rendezvous there. 0: chosen by the system.", flag="--master-port"
    )
    device_type: str = option(
        "auto",
        Name(),
        '"auto": the accelerator that torch was built for if one is visible, else "cpu". Or one by name: "cpu", '
        '"cuda", ...',
    )
    backend: str | None = option(
        None,
        Name(optional=True),
        "The process group's: any that ``init_process_group`` takes and this torch offers. None: the device's own "
        "plus gloo for CPU tensors (``cpu:gloo,cuda:nccl``); on CPUs gloo.",
    )
    _: KW_ONLY
    devices: Sequence[int] | None = option(
        None,
        Devices(),
        "Which accelerators, by number among the visible ones. Ranks see these alone (``CUDA_VISIBLE_DEVICES``), so "
        "local rank i finds ``devices[i]`` under the number i. Where a kind has no such variable, ask "
        "``mlaunch.device()``. If more than ``n_gpus`` are named, the call waits for that many of them (``lease``).",
        flag="--devices",
    )
    lease: bool | str = option(
        False,
        Leasing(),
        "Waits for devices that no other launch with a lease has, and keeps them until its last process is gone: "
        "``n_gpus`` of ``devices``, or of all that are visible. All processes of this user on this machine wait in one "
        "queue. On CPUs see ``concurrent``. 'idle': of the free devices, first those that no process uses (NVIDIA's).",
        flag="--lease",
    )
    concurrent: int | None = option(
        None,
        Whole(1, optional=True),
        "On CPUs, how many launches with a lease run at a time; a number is a ``lease``, too. None: as many as have a "
        "CPU for each rank.",
    )
    numa: str | None = option(
        None,
        WordOrCpus("node", "socket", "exclusive", "core-complex", None),
        'Binds each rank to CPUs near its device before it has a thread: to those of the device\'s NUMA "node", all of '
        'its "socket", an "exclusive" share of the node\'s cores, or a "core-complex" (a shared cache) there. Or to '
        'lists, by local rank: "0-7;8-15". None: ranks run on any CPU that this process may use.',
        flag="--numa-binding",
    )
    numa_memory: str | None = option(
        None,
        Choice("preferred", "bind", None),
        'Takes the memory of a rank that ``numa`` binds from the nodes of its CPUs: "preferred", or from nowhere else '
        '("bind"). None: as the kernel does.',
        flag="--numa-memory",
    )
    oversubscribe: bool = option(
        False,
        Switch(),
        "Allows more than 64 ranks where that is more than 8 for each CPU, which mostly is a typing error.",
        flag="--oversubscribe",
    )
    timeout: float | timedelta | None = option(
        1800.0, Seconds(optional=True, delta=True), "Seconds for each collective, and for joining; or a timedelta."
    )
    grace_period: float = option(
        5.0,
        Seconds(zero=True),
        "Seconds between SIGTERM and SIGKILL for stopped ranks, and, 5 at least, for ranks to end once all have "
        "returned.",
        flag="--shutdown-timeout",
    )
    deadline: float | None = option(
        None,
        Seconds(optional=True),
        "Limit in seconds for the whole call, restarts included, from the moment at which its ranks are started. "
        "When it has passed, ranks are stopped and the call raises ``LaunchTimeout``. None: no limit.",
        flag="--deadline",
    )
    stop_on: str | None = option(
        None,
        Signals(),
        'Signals of this process, with commas ("TERM,USR1"), that ask the ranks to stop at a step that they agree on: '
        "``mlaunch.stopping()`` is true there. None: no signal asks them.",
        flag="--stop-on",
    )
    stop_grace: float = option(
        300.0,
        Seconds(),
        "Seconds in which ranks that are asked to stop have to return. Then the call fails as at a deadline.",
        flag="--stop-grace",
    )
    stall: float | str | None = option(
        300.0,
        StallLimit(),
        "Seconds without progress on any rank (operations, ``mlaunch.progress``, ``mlaunch.stopping``) after which a "
        'report says once which rank the others wait for; the run goes on. "60 stop" ends it. None: no report.',
        flag="--stall",
    )
    slow: float | str | None = trouble_options.SLOW
    debug: bool | str = trouble_options.DEBUG
    inline: bool = trouble_options.INLINE
    max_restarts: int = option(
        0,
        Whole(0),
        "How often all ranks are started again after a failure. Each time in a new process group, with "
        "``TORCHELASTIC_RESTART_COUNT`` counting up and a warning that says why; the last failure is raised.",
        flag="--max-restarts",
    )
    max_preemptions: int = option(
        0, Whole(0), "How often a call starts anew on other machines when the scheduler takes an engine's machines."
    )
    start_method: str = option(
        "forkserver",
        Choice("forkserver", "fork", "spawn"),
        '"forkserver" (a warm process with torch imported; this process is not forked), "fork" (ranks inherit this '
        'process\'s memory; refused once an accelerator is initialised) or "spawn" (a fresh interpreter for each '
        "call).",
    )
    env: Mapping[str, str] | None = option(None, Variables(), "Environment variables to add for the ranks.")
    seed: int | str | None = option(
        None,
        Seed(),
        "Seeds Python's, numpy's and torch's generators. A number: the same on all ranks; \"per-rank\": 1024 plus the "
        'rank; "per-rank:7": 7 plus the rank. None: each rank\'s torch generator gets a fresh seed.',
    )
    join: bool = option(
        True,
        Switch(),
        "In a process that torchrun, srun, mpirun or submitit started as a rank, join the other ranks and run the "
        "function here, which gives a list of one value, instead of starting ranks. False: always start ranks. "
        "``MLAUNCH_JOIN=0`` in the environment means the same.",
    )
    join_timeout: float = option(
        300.0, Seconds(), "Seconds for the machines of a launch to come together.", flag="--rdzv-conf"
    )
    heartbeat_timeout: float = option(
        15.0, Seconds(), "Seconds after which a machine that says nothing counts as lost."
    )
    token: str | None = option(
        None,
        Secret(),
        "A secret that the machines of a launch share, and prove to each other before anything else. None: "
        "``MLAUNCH_TOKEN``; where that is not set either, whoever reaches the port may join.",
        flag="--token-file",
        variable="MLAUNCH_TOKEN",
        shown=False,
    )
    results: str = option(
        "all",
        Choice("all", "rank0"),
        '"all": every rank\'s value comes back. "rank0": that of rank 0 alone; the others\' are not even pickled, and '
        "None stands in the list for them.",
    )
    output: str = option(
        "all",
        Choice("all", "rank0", "none", "raw"),
        "What ranks print is shown here with their rank in front, ``[3]``, and once where several ranks print the "
        'same line: "all" of it, that of "rank0" alone, or "none". "raw": ranks write to the streams of this '
        "process themselves.",
    )
    log_dir: str | os.PathLike[str] | None = option(
        None,
        Directory(),
        "A directory in which each call makes one of its own, with a file per attempt, rank and stream.",
        flag="--log-dir",
    )
    progress: bool = option(
        True,
        Switch(),
        "Shows a line that tells how far the launch is: in notebooks, and on terminals (extra ``notebook``).",
    )
    events: str | os.PathLike[str] | Callable[[dict[str, Any]], object] | None = option(
        None,
        Listener(),
        "What gets the events of the launch as they happen (launch, rank, failure, stall, stop, restart, end): a "
        'function, which is called with a dictionary, a file, which gets a line of JSON for each, or "otel" for spans '
        "of OpenTelemetry (extra ``otel``).",
        flag="--events",
    )
    profile: str | os.PathLike[str] | None = option(
        None,
        FilePath(),
        "A file that gets a trace of torch.profiler, with a track for each rank and the launch's own timeline, for "
        'https://ui.perfetto.dev; a name with ".gz" at its end is compressed. Replaced if it exists.',
    )
    profile_steps: Sequence[int] = option(
        (5, 8),
        FromTo(),
        "The steps to trace: from the first of these numbers on, until before the second. ``mlaunch.progress`` or "
        "``mlaunch.step()`` counts them, from 0.",
    )
    profile_ranks: Sequence[int] | None = option(None, SomeRanks(), "The ranks to trace. None: all.")
    keep: float | None = option(
        None,
        Seconds(optional=True, none=""),
        "Seconds for which the ranks stay after a call, for the next one of any function with equal options. Each call "
        "sets the time anew. None: each call starts its own ranks.",
    )
    ranks: TakesCalls | None = option(
        None,
        Staying(),
        "``Ranks`` that the function is to run on, instead of ranks of its own. All options but ``deadline``, "
        "``log_dir`` and ``progress`` are then those of the ``Ranks``.",
    )
    engine: PlacesRanks | None = option(
        None,
        AnEngine(),
        "Who places the ranks on other machines: an engine of ``mlaunch.engines``, or what its ``hold()`` returned. "
        "The list then has the values of all ranks. None: they run on this machine.",
        flag="--engine",
    )
    machines: int | None = option(
        None,
        Whole(1, optional=True),
        "Machines that the engine is to give, with ``n_gpus`` ranks on each. None: as many as it has, or one.",
    )

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError that names the option, the value and what is allowed."""
        values = {given.name: getattr(self, given.name) for given in fields(self)}
        for name, value in values.items():
            about(name).allowed.check(name, value)
        check_together(values)

    @property
    def timeout_seconds(self) -> float | None:
        return self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else self.timeout

    @functools.cached_property
    def features(self) -> list[Feature]:
        """Those that are asked for."""
        return asked_for(self)

    def replaced(self, changes: Mapping[str, Any]) -> Options:
        """Returns a checked copy. TypeError for a name that is no option."""
        names = [given.name for given in fields(self)]
        for name in changes:
            if name not in names:
                raise TypeError(f"launcher has no option {name!r}; {_nearest(name, names)}")
        return Options(**{**{name: getattr(self, name) for name in names}, **changes})


def _nearest(name: str, names: Sequence[str]) -> str:
    import difflib  # for this alone

    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else "help(launcher) lists what there is"
