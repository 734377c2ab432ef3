"""The features of a launch: each has a folder of this package and one line here. ``core/parts.py`` has their hooks."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Container, Mapping
from typing import Any

from mlaunch.base.frozen_record import frozen_record


@frozen_record
class Feature:
    """A feature; a launch that has not asked for it imports nothing of it.

    Attributes:
        name: Its folder, and its section of a launch's spec.
        options: Those that are its own.
        asks: True if these options, by name, ask for it.
        one_call: Why it is for one blocking call with ranks of its own; "": it goes with all calls.
        instead: What to do on ranks that were started without it; "": they have it anyway.
        waits: A call may wait for it before it starts.
        servers: It may have a fork server at hand, before a fresh interpreter is started.
        variable: Of the environment, which asks for it; "0" is as good as none.
        processes: Those besides the caller that make a part of its section: "rank", "member", "agent".
        visited: Commands may ask its part in an agent for something.
        stands_in: Modules that its ``rank.py`` replaces as ranks import them (``rank/setup/interpreter.py``).
        words: What who looks at a launch may ask its part in the agent.
        watches: It may look at calls that take longer than a moment: ``watch(call)``.
        explains: It says who waited for whom at a deadline: ``of_deadline(stacks, returned)``.
        adapts: Its ``caller.py`` changes other options of a call that asks for it: ``adapt(options)``.
        apart: A launch with its section is neither prepared nor prepares another one.
        breakpoints: Its ``rank.py`` has what ``breakpoint()`` does in a rank, as ``at_breakpoint(who, pid)``.
        drives: Its ``caller.py`` has what drives a launch in place of the usual handle, as ``handle(sections, usual)``.
    """

    name: str
    options: tuple[str, ...]
    asks: Callable[[Mapping[str, Any]], bool]
    one_call: str = ""
    instead: str = ""
    waits: bool = False
    servers: bool = False
    variable: str = ""
    processes: tuple[str, ...] = ()
    visited: bool = False
    stands_in: tuple[str, ...] = ()
    words: tuple[bytes, ...] = ()
    watches: bool = False
    explains: bool = False
    adapts: bool = False
    apart: bool = False
    breakpoints: bool = False
    drives: bool = False


_STOP_GRACE = _STALL = 300.0  # seconds, unless the options say something else


def _never(_given: Mapping[str, Any]) -> bool:
    """For what methods ask for, and no option."""
    return False


def _wants_lease(given: Mapping[str, Any]) -> bool:
    fewer = given["devices"] is not None and given["n_gpus"] not in {None, len(given["devices"])}
    return bool(given["lease"] or given["concurrent"] is not None or fewer)


def _wants_stop(given: Mapping[str, Any]) -> bool:
    return given["stop_on"] is not None or given["stop_grace"] != _STOP_GRACE


def _wants_stall(given: Mapping[str, Any]) -> bool:
    return bool(given["stall"] != _STALL)


def _wants_debugger(given: Mapping[str, Any]) -> bool:
    # An IDE that debugs this process may follow its children: ranks go there by themselves, if they know how.
    return bool(given["debug"]) or ("pydevd" in sys.modules and importlib.util.find_spec("mlaunch.debug") is not None)


def _given(option: str) -> Callable[[Mapping[str, Any]], bool]:
    """For what one option asks for."""
    return lambda given: given[option] is not None


# In the order in which they surround a call.
FEATURES = (
    Feature("cells", (), _never),
    Feature("ci", (), _never),
    Feature("comm", (), _never),
    Feature("compat", (), _never),
    Feature("display", (), _never, processes=("rank",), stands_in=("tqdm.notebook", "IPython.core.display_functions")),
    Feature("engines", (), _never),
    Feature("agreed_stop", ("stop_on", "stop_grace"), _wants_stop, visited=True),
    Feature(
        "events",
        ("events",),
        _given("events"),
        one_call="it tells of ranks that begin and end with a call; Ranks.last has the report of each call",
        instead="train.last",
    ),
    Feature(
        "insight",
        ("stall",),
        _wants_stall,
        words=(b"why", b"stacks", b"all stacks", b"pulse", b"watch"),
        watches=True,
        explains=True,
    ),
    Feature("leases", ("lease", "concurrent"), _wants_lease, waits=True),
    Feature("machines", (), _never),
    Feature("numa", ("numa", "numa_memory"), _given("numa"), processes=("rank", "member")),
    Feature(
        "profile",
        ("profile", "profile_steps", "profile_ranks"),
        _given("profile"),
        one_call="it would have steps of many calls; profile in the function, with torch.profiler",
        instead="torch.profiler in the function",
        processes=("rank", "member"),
    ),
    Feature("pytest", (), _never),
    Feature("run", (), _never),
    Feature(
        "slow",
        ("slow",),
        _given("slow"),
        instead="mlaunch why, while ranks wait",
        processes=("rank", "agent"),
        apart=True,
    ),
    Feature("sweeps", (), _never),
    Feature("warm", (), _never, servers=True, variable="MLAUNCH_WARM"),
    Feature(
        "debug",
        ("debug",),
        _wants_debugger,
        processes=("rank",),
        visited=True,
        adapts=True,
        apart=True,
        breakpoints=True,
        drives=True,
    ),  # last: around nothing but the function
)
OPTIONS = frozenset(name for feature in FEATURES for name in feature.options)


def served_apart(names: Container[str]) -> bool:
    """True if a launch with sections of these features is neither prepared nor prepares another one."""
    return any(feature.one_call or feature.apart for feature in FEATURES if feature.name in names)


def asked_for(options: object) -> list[Feature]:
    """Return the features that these options ask for."""
    return [feature for feature in FEATURES if feature.asks(vars(options))]
