"""The options of a launch. Each is stated once, as a field of ``Options``: name, type, default, values, meaning, flag.

The signature of ``launcher``, its documentation, the checks (``option_text``) and the flags of ``mlaunch run``
(``run/command/flags.py``) are made from these fields. What must be repeated elsewhere for editors (``option_types``) is
compared with them in ``tests/unit/test_options.py``. ``features.py`` says which feature has an option.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, fields
from datetime import timedelta
from typing import Any, cast

from mlaunch.base.frozen_record import frozen_record
from mlaunch.caller.options.option_fields import ENDING, MEETING, OUTPUT, SIZES, About, Flag, check_together, option
from mlaunch.caller.options.option_values import (
    HIGHEST_PORT,
    AnEngine,
    Choice,
    DebugWay,
    Devices,
    Directory,
    FilePath,
    FromTo,
    Leasing,
    Listener,
    Name,
    PlacesRanks,
    Seconds,
    Secret,
    Seed,
    ShareOfTime,
    Signals,
    SomeRanks,
    StallLimit,
    Staying,
    Switch,
    TakesCalls,
    Variables,
    Whole,
    WordOrCpus,
)
from mlaunch.features import Feature, asked_for


def about(name: str) -> About:
    """Return what the field of this name says."""
    return cast(About, Options.__dataclass_fields__[name].metadata["about"])


@frozen_record
class Options:
    """The arguments of ``launcher`` other than the function. Those before ``KW_ONLY`` also by position."""

    n_gpus: int | None = option(
        None,
        Whole(1, optional=True),
        "Ranks on this machine; on CPUs any number. None: one per visible accelerator; where there is none, "
        "one per CPU that this process may use.",
        Flag(
            ("--nproc-per-node",),
            "N",
            "ranks on this machine: a number, gpu, cpu, xpu or auto (one per device; without devices, one per CPU); "
            "default: 1, or as many as --devices",
            SIZES,
            torchruns=True,
            apart=True,
            kind=str,
        ),
    )
    world_size: int | None = option(
        None,
        Whole(1, optional=True),
        "Ranks on all machines (the flag: how many of these). None: ``n_gpus``.",
        Flag(("--nnodes",), "N", "machines (default: 1)", SIZES, torchruns=True, apart=True, kind=str),
    )
    rank_start: int = option(
        0,
        Whole(0),
        "The first rank of this machine (the flag: which machine this is, from 0).",
        Flag(("--node-rank",), "N", "which of them this is (default: 0)", SIZES, torchruns=True, apart=True),
    )
    master_ip: str = option(
        "localhost",
        Name(),
        "The address of the machine with rank 0.",
        Flag(
            ("--master-addr",),
            "HOST",
            "address of the machine with rank 0 (default: 127.0.0.1)",
            MEETING,
            torchruns=True,
            apart=True,
        ),
    )
    port: int = option(
        0,
        Whole(0, HIGHEST_PORT),
        "The port of the rendezvous there. 0: chosen by the system.",
        Flag(
            ("--master-port",),
            "PORT",
            "its port (default: 29500; on one machine, a free one)",
            MEETING,
            torchruns=True,
            apart=True,
        ),
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
        "Which accelerators, by number among the visible ones. Ranks see only these (``CUDA_VISIBLE_DEVICES``), so "
        "local rank i finds ``devices[i]`` under the number i. Where a kind has no such variable, ask "
        "``mlaunch.device()``. If more than ``n_gpus`` are named, the call waits for that many of them (``lease``).",
        Flag(("--devices",), "I,J", "the devices that ranks see, by number (default: all)", SIZES, apart=True),
    )
    lease: bool | str = option(
        False,
        Leasing(),
        "The call waits until ``n_gpus`` of ``devices`` (or of all visible ones) are free, and keeps them until its "
        "last process is gone. No other launch with a lease gets them. All processes of this user on this machine wait "
        "in one queue. On CPUs see ``concurrent``. 'idle': of the free devices, first those that no process uses "
        "(NVIDIA's).",
        Flag(
            ("--lease",),
            "N",
            "wait for N devices (of --devices, or of all) that no other launch with a lease has, and start a rank on "
            "each, or as many as --nproc-per-node says",
            SIZES,
            apart=True,
            kind=int,
        ),
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
        Flag(
            ("--numa-binding",),
            "MODE",
            "bind each rank to CPUs near its device: node, socket, exclusive or core-complex; or CPUs by local rank, "
            "'0-7;8-15'",
            SIZES,
            torchruns=True,
        ),
    )
    numa_memory: str | None = option(
        None,
        Choice("preferred", "bind", None),
        'Takes the memory of a rank that ``numa`` binds from the nodes of its CPUs: "preferred", or from nowhere else '
        '("bind"). None: as the kernel does.',
        Flag(
            ("--numa-memory",),
            "HOW",
            "take the memory of each rank from the nodes of its CPUs: preferred or bind",
            SIZES,
        ),
        needs=("numa", "memory goes with the CPUs that a rank is bound to"),
    )
    oversubscribe: bool = option(
        False,
        Switch(),
        "Allows more than 64 ranks even if that is more than 8 for each CPU, which mostly is a typing error.",
        Flag(("--oversubscribe",), "", "allow more than 8 ranks for each CPU when there are more than 64", SIZES),
    )
    timeout: float | timedelta | None = option(
        1800.0, Seconds(optional=True, delta=True), "Seconds for each collective, and for joining; or a timedelta."
    )
    grace_period: float = option(
        5.0,
        Seconds(zero=True),
        "Seconds between SIGTERM and SIGKILL for stopped ranks, and, 5 at least, for ranks to end once all have "
        "returned.",
        Flag(
            ("--shutdown-timeout", "--grace-period"),
            "SECONDS",
            "how long ranks may take to end (default: $TORCH_ELASTIC_SHUTDOWN_TIMEOUT, 30)",
            ENDING,
            torchruns=True,
            apart=True,
        ),
    )
    deadline: float | None = option(
        None,
        Seconds(optional=True),
        "Limit in seconds for the whole call, restarts included, from the moment at which its ranks are started. "
        "When it has passed, ranks are stopped and the call raises ``LaunchTimeout``. None: no limit.",
        Flag(("--deadline",), "SECONDS", "limit for the whole run (default: none)", ENDING),
    )
    stop_on: str | None = option(
        None,
        Signals(),
        'Signals of this process, with commas ("TERM,USR1"), that ask the ranks to stop at a step that they agree on: '
        "``mlaunch.stopping()`` is true there. None: no signal asks them.",
        Flag(
            ("--stop-on",),
            "NAMES",
            "signals that ask the ranks to stop at a step that they agree on, where mlaunch.stopping() is true "
            "(default: none)",
            ENDING,
        ),
    )
    stop_grace: float = option(
        300.0,
        Seconds(),
        "Seconds in which ranks that are asked to stop have to return. Then the call fails as at a deadline.",
        Flag(("--stop-grace",), "SECONDS", "for ranks that are asked to stop (default: 300)", ENDING),
    )
    stall: float | str | None = option(
        300.0,
        StallLimit(),
        "Seconds without progress on any rank (operations, ``mlaunch.progress``, ``mlaunch.stopping``) after which a "
        'report says once which rank the others wait for; the run continues. "60 stop" ends it. None: no report.',
        Flag(
            ("--stall",),
            "SECONDS",
            "after so long without progress, report once which rank the others wait for; '60 stop' ends the run; "
            "none: no report (default: 300)",
            ENDING,
        ),
    )
    slow: float | str | None = option(
        None,
        ShareOfTime(),
        'A share of the time, such as "10%". If the others wait for the same rank for longer, of 30 s, a report says '
        "once which rank it is, and the run continues; ``mlaunch why`` and ``mlaunch ps`` say it at any time. None: "
        "ranks are not compared.",
        Flag(
            ("--slow",),
            "SHARE",
            "report once when, over 30 s, the other ranks wait for the same rank for more than this share of their "
            "time, such as 10% (default: never)",
            ENDING,
            of_python="collectives are timed in Python",
        ),
    )
    debug: bool | str = option(
        False,
        DebugWay(),
        "A rank that fails, or calls ``breakpoint()``, opens pdb in this terminal or cell. With "
        '"debugpy:0,2" these ranks wait for an IDE. No ``timeout`` or ``stall`` counts; ``deadline`` waits.',
    )
    inline: bool = option(
        False,
        Switch(),
        "No processes: the function runs in this one, as rank 0 of a world of one, whatever ``n_gpus`` says.",
    )
    max_restarts: int = option(
        0,
        Whole(0),
        "How often all ranks are started again after a failure. Each time in a new process group, with "
        "``TORCHELASTIC_RESTART_COUNT`` counting up and a warning that says why; the last failure is raised.",
        Flag(("--max-restarts",), "N", "start all ranks again after a failure (default: 0)", ENDING, torchruns=True),
    )
    max_preemptions: int = option(
        0,
        Whole(0),
        "How often a call starts again on other machines when the scheduler takes an engine's machines.",
        Flag(
            ("--max-preemptions",),
            "N",
            "with --engine: start all ranks again when a scheduler has taken their machines away (default: 0)",
            ENDING,
            apart=True,
        ),
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
        300.0,
        Seconds(),
        "Seconds for the machines of a launch to come together.",
        Flag(
            ("--rdzv-conf",),
            "K=V,...",
            "join_timeout or timeout in seconds, rank, is_host",
            MEETING,
            torchruns=True,
            apart=True,
            kind=str,
        ),
    )
    heartbeat_timeout: float = option(
        15.0, Seconds(), "Seconds after which a machine that says nothing counts as lost."
    )
    token: str | None = option(
        None,
        Secret(),
        "A secret that the machines of a launch share, and prove to each other before anything else. None: "
        "``MLAUNCH_TOKEN``; if that is not set either, anybody who reaches the port may join.",
        Flag(("--token-file",), "FILE", "a secret that all machines share (or MLAUNCH_TOKEN)", MEETING, apart=True),
        variable="MLAUNCH_TOKEN",
        shown=False,
    )
    results: str = option(
        "all",
        Choice("all", "rank0"),
        '"all": every rank\'s value comes back. "rank0": only that of rank 0; the others\' are not even pickled, and '
        "the list has None in their places.",
    )
    output: str = option(
        "all",
        Choice("all", "rank0", "none", "raw"),
        "What ranks print is shown here with their rank in front, ``[3]``, and once where several ranks print the "
        'same line: "all" of it, only that of "rank0", or "none". "raw": ranks write to the streams of this '
        "process themselves.",
    )
    log_dir: str | os.PathLike[str] | None = option(
        None,
        Directory(),
        "A directory in which each call makes one of its own, with a file per attempt, rank and stream.",
        Flag(
            ("--log-dir",),
            "DIR",
            "where --redirects and --tee write (default: a new directory)",
            OUTPUT,
            torchruns=True,
            apart=True,
        ),
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
        Flag(
            ("--events",),
            "FILE",
            "a line of JSON for each event (launch, rank, failure, stall, slow, stop, restart, end), added to FILE; "
            "otel: spans of OpenTelemetry",
            OUTPUT,
        ),
    )
    profile: str | os.PathLike[str] | None = option(
        None,
        FilePath(),
        "A file that gets a trace of torch.profiler, with a track for each rank and the launch's own timeline, for "
        'https://ui.perfetto.dev; a name with ".gz" at its end is compressed. Replaced if it exists.',
        Flag(
            ("--profile",),
            "FILE",
            "a trace of torch.profiler, with a track for each rank, for ui.perfetto.dev; compressed if it ends with "
            ".gz",
            OUTPUT,
            of_python="torch.profiler is of Python's",
        ),
    )
    profile_steps: Sequence[int] = option(
        (5, 8),
        FromTo(),
        "The steps to trace: from the first of these numbers on, until before the second. ``mlaunch.progress`` or "
        "``mlaunch.step()`` counts them, from 0.",
        Flag(
            ("--profile-steps",),
            "I,J",
            "the first step and the one after the last: turns of mlaunch.progress, or calls of mlaunch.step() "
            "(default: 5,8)",
            OUTPUT,
        ),
    )
    profile_ranks: Sequence[int] | None = option(
        None,
        SomeRanks(),
        "The ranks to trace. None: all.",
        Flag(("--profile-ranks",), "I,J", "trace these ranks (default: all)", OUTPUT),
    )
    keep: float | None = option(
        None,
        Seconds(optional=True, none=""),
        "Seconds for which the ranks stay after a call, for the next one of any function with equal options. Each call "
        "starts that time again. None: each call starts its own ranks.",
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
        Flag(
            ("--engine",),
            "NAME",
            "what starts ranks on --nnodes machines: slurm:partition=P, ssh:HOST,HOST, ray:GPU=4, "
            "'command:mpirun -N 1' (default: this machine)",
            SIZES,
            apart=True,
        ),
    )
    machines: int | None = option(
        None,
        Whole(1, optional=True),
        "Machines that the engine is to give, with ``n_gpus`` ranks on each. None: as many as it has, or one.",
    )

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError that names the option, the value and what is allowed."""
        values = {given.name: getattr(self, given.name) for given in fields(self)}
        for name, value in values.items():
            about(name).allowed.check(name, value)
            needs, why = about(name).needs or (name, "")
            if value is not None and why and values[needs] is None:
                raise ValueError(f"{name}={value!r} without {needs}=: {why}; allowed: with {needs}=")
        check_together(values)

    @property
    def timeout_seconds(self) -> float | None:
        return self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else self.timeout

    @functools.cached_property
    def features(self) -> list[Feature]:
        """Return the features that these options ask for."""
        return asked_for(self)

    def replaced(self, changes: Mapping[str, Any]) -> Options:
        """Return a checked copy. TypeError for a name that is no option."""
        names = [given.name for given in fields(self)]
        for name in changes:
            if name not in names:
                raise TypeError(f"launcher has no option {name!r}; {_nearest(name, names)}")
        return Options(**{**{name: getattr(self, name) for name in names}, **changes})


def _nearest(name: str, names: Sequence[str]) -> str:
    import difflib  # only needed here

    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else "help(launcher) lists what there is"
