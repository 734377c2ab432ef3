"""The features of a launch: each has a folder of this package and one line here. ``core/parts.py`` has their hooks."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Container, Mapping
from typing import Any

from mlaunch.base.frozen_record import frozen_record


@frozen_record
class Feature:
    """A feature. A launch that does not ask for it imports none of its modules.

    Attributes:
        name: Its folder, and its section of a launch's spec.
        options: Its own options. The first one names it in errors.
        asks: A function of the given options, by name: True if they ask for the feature.
        one_call: Why it works only for one blocking call with ranks of its own; "": it works for all calls.
        instead: The advice for ranks that were started without it; "": they have it anyway.
        hooks: The functions of its files that the core calls, in addition to ``part`` in the caller: "rank.part" is
            ``part`` in ``rank.py``. With "agent.part", its part in the agent is made with the launch, not by the first
            record for it. ``core/parts.py`` lists all. A test compares them with the files.
        words: The requests to its part in the agent that visitors of a launch may send.
        stands_in: Modules that its ``rank.py`` replaces as ranks import them (``rank/process.py``).
        runs: Its files that run a function in a rank; a folder ends with a slash. Frames below them in a stack are
            mlaunch's (``base/frames.py``).
        around: Its files that a rank runs before and after a function, such as to wait for the next call. The place of
            a rank that waits does not name them, nor those of features with ``runs``.
    """

    name: str
    options: tuple[str, ...]
    asks: Callable[[Mapping[str, Any]], bool]
    one_call: str = ""
    instead: str = ""
    hooks: tuple[str, ...] = ()
    words: tuple[bytes, ...] = ()
    stands_in: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    around: tuple[str, ...] = ()


_STOP_GRACE = _STALL = 300.0  # seconds, by default


def _never(_given: Mapping[str, Any]) -> bool:
    """Return False: methods ask for the feature, no option does."""
    return False


def _wants_lease(given: Mapping[str, Any]) -> bool:
    fewer = given["devices"] is not None and given["n_gpus"] not in {None, len(given["devices"])}
    return bool(given["lease"] or given["concurrent"] is not None or fewer)


def _wants_stop(given: Mapping[str, Any]) -> bool:
    return given["stop_on"] is not None or given["stop_grace"] != _STOP_GRACE


def _wants_stall(given: Mapping[str, Any]) -> bool:
    return bool(given["stall"] != _STALL)


def _wants_debugger(given: Mapping[str, Any]) -> bool:
    # An IDE that debugs this process may follow its children: ranks connect to it by themselves, if they can.
    return bool(given["debug"]) or ("pydevd" in sys.modules and importlib.util.find_spec("mlaunch.debug") is not None)


def _given(option: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return a function for ``asks`` of a feature that one option asks for."""
    return lambda given: given[option] is not None


# In the order in which they surround a call.
FEATURES = (
    Feature("cells", (), _never, runs=("rank/",)),
    Feature("ci", (), _never),
    Feature("comm", (), _never),
    Feature("compat", (), _never),
    Feature(
        "display",
        (),
        _never,
        hooks=("rank.part",),
        stands_in=("tqdm.notebook", "IPython.core.display_functions"),
    ),
    Feature("engines", (), _never),
    Feature("agreed_stop", ("stop_on", "stop_grace"), _wants_stop, hooks=("agent.visited",)),
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
        hooks=("caller.watch", "caller.of_deadline"),
        words=(b"why", b"stacks", b"all stacks", b"pulse", b"watch"),
    ),
    Feature("leases", ("lease", "concurrent"), _wants_lease, hooks=("caller.acquire",)),
    Feature("machines", (), _never),
    Feature(
        "numa",
        ("numa", "numa_memory"),
        _given("numa"),
        hooks=("rank.part", "member.part", "command.findings"),
    ),
    Feature(
        "profile",
        ("profile", "profile_steps", "profile_ranks"),
        _given("profile"),
        one_call="it would have steps of many calls; profile in the function, with torch.profiler",
        instead="torch.profiler in the function",
        hooks=("rank.part", "member.part"),
    ),
    Feature("pytest", (), _never, runs=("rank/run_test.py",)),
    Feature("ranks", (), _never, around=("rank/",)),
    Feature("run", (), _never, runs=("rank.py",)),
    Feature(
        "slow",
        ("slow",),
        _given("slow"),
        instead="mlaunch why, while ranks wait",
        hooks=("rank.part", "agent.part"),
    ),
    Feature("sweeps", (), _never),
    Feature("warm", (), _never, hooks=("caller.server",)),
    Feature(
        "debug",
        ("debug",),
        _wants_debugger,
        hooks=("rank.part", "agent.welcome", "caller.adapt", "caller.handle", "rank.at_breakpoint"),
        runs=("rank/__init__.py", "rank/ide.py"),
    ),  # last: it surrounds only the function
)
OPTIONS = frozenset(name for feature in FEATURES for name in feature.options)


def served_apart(names: Container[str]) -> bool:
    """True if a launch with sections of these features is neither prepared nor prepares another one."""
    there = [feature for feature in FEATURES if feature.name in names]
    return any(one.one_call or {"caller.handle", "agent.part"} & {*one.hooks} for one in there)


def asked_for(options: object) -> list[Feature]:
    """Return the features that these options ask for."""
    return [feature for feature in FEATURES if feature.asks(vars(options))]


def with_hook(hook: str) -> list[Feature]:
    """Return the features that have a hook: "caller.watch"."""
    return [feature for feature in FEATURES if hook in feature.hooks]
