"""The facts about an option, as a field of ``Options`` states them; and checks of those that do not go together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field
from typing import Any, TypeVar

from mlaunch.base.frozen_record import frozen_record
from mlaunch.caller.options.option_values import HIGHEST_PORT, OptionType
from mlaunch.features import FEATURES, with_hook

T = TypeVar("T")
# The groups of flags in ``mlaunch run --help``.
SIZES, MEETING, OUTPUT, ENDING = "how many ranks, and where", "several machines", "output", "failure and end"


@frozen_record
class Flag:
    """A flag of ``mlaunch run`` that sets an option.

    Attributes:
        names: Its own, and others for the same.
        metavar: For its value; "": it has none.
        meaning: For people.
        group: Of flags, in the help.
        torchruns: Torchrun has it, too: it has two spellings, and a variable.
        apart: The command reads it with others, in ``run/command/job.py``.
        kind: What argparse makes of its value; None: as usual for the option.
        of_python: Why it does not go with ``--no-python``; "": it does.
    """

    names: tuple[str, ...]
    metavar: str
    meaning: str
    group: str
    torchruns: bool = False
    apart: bool = False
    kind: type | None = None
    of_python: str = ""


@frozen_record
class About:
    """The facts about an option other than its name, type and default.

    Attributes:
        allowed: Checks its values, and names them.
        meaning: For people.
        flag: The flag of ``mlaunch run`` that sets it; None if there is none.
        variable: The environment variable that counts if the option is not given; "": there is none.
        needs: The option without which it has no effect, and why.
    """

    allowed: OptionType
    meaning: str
    flag: Flag | None = None
    variable: str = ""
    needs: tuple[str, str] | None = None


def option(
    default: T,
    allowed: OptionType,
    meaning: str,
    flag: Flag | None = None,
    *,
    variable: str = "",
    needs: tuple[str, str] | None = None,
    shown: bool = True,
) -> T:
    """Return a dataclass's field with all facts about the option. ``shown``: ``repr`` shows its value."""
    return field(default=default, repr=shown, metadata={"about": About(allowed, meaning, flag, variable, needs)})


# Options that do not go together. The messages say what does.


def check_together(given: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError that names the options, their values and what is allowed."""
    _check_log_dir(given)
    _check_size(given)
    _check_ranks(given)
    _check_engine(given)
    _check_lease(given)
    _check_debug(given)
    _check_features(given)
    _check_inline(given)


def _check_log_dir(given: Mapping[str, Any]) -> None:
    if given["log_dir"] is not None and (
        not isinstance(given["log_dir"], str | os.PathLike) or given["output"] == "raw"
    ):
        raise ValueError(
            f"log_dir={given['log_dir']!r} with output={given['output']!r}: allowed: a path; with "
            f"output='raw' ranks write to the streams of this process themselves"
        )


def _check_size(given: Mapping[str, Any]) -> None:
    if given["devices"] is not None and (given["n_gpus"] or 0) > len(given["devices"]):
        raise ValueError(
            f"n_gpus={given['n_gpus']} with devices={list(given['devices'])}: allowed: n_gpus={len(given['devices'])}, "
            f"fewer (then any that are free), or only one of the two"
        )


def _check_ranks(given: Mapping[str, Any]) -> None:
    size = given["n_gpus"] or (None if given["devices"] is None else len(given["devices"]))
    if given["rank_start"] > 0 and given["port"] == 0:
        raise ValueError(
            f"rank_start={given['rank_start']} with port=0: a machine that joins others must know the port on which "
            f"rank 0's machine listens; allowed: 1 to {HIGHEST_PORT}"
        )
    if given["world_size"] is not None and given["rank_start"] + (size or 1) > given["world_size"]:
        raise ValueError(
            f"rank_start={given['rank_start']} with n_gpus={size or 'unset'} and world_size={given['world_size']}: "
            f"allowed: rank_start + n_gpus up to world_size"
        )


def _check_engine(given: Mapping[str, Any]) -> None:
    if given["engine"] is None and given["machines"] is not None:
        raise ValueError(
            f"machines={given['machines']} without engine=: only an engine places ranks on other machines; give "
            f"one of mlaunch.engines, or start the script on each machine with world_size= and rank_start="
        )
    if given["engine"] is None and given["max_preemptions"]:
        raise ValueError(f"max_preemptions={given['max_preemptions']} without engine=: only an engine starts a call "
                         f"again on other machines; allowed: 0")  # fmt: skip
    others = {"world_size": None, "rank_start": 0, "ranks": None, "start_method": "forkserver"}
    for name, usual in others.items() if given["engine"] is not None else ():
        if given[name] != usual:
            raise ValueError(f"{name}={given[name]!r} with engine=: allowed: {usual!r}")
    if given["engine"] is not None and given["output"] == "raw":
        raise ValueError("output='raw' with engine=: ranks on other machines have no streams of this process; allowed: "
                         "'all', 'rank0', 'none'")  # fmt: skip


def _check_debug(given: Mapping[str, Any]) -> None:
    others = {"engine": None, "ranks": None, "keep": None, "max_restarts": 0}
    for name, usual in others.items() if given["debug"] else ():
        if given[name] != usual:
            raise ValueError(
                f"{name}={given[name]!r} with debug={given['debug']!r}: allowed: {usual!r}; a debugger serves one call "
                f"on ranks of its own"
            )
    size = given["n_gpus"] or (None if given["devices"] is None else len(given["devices"]))
    if given["debug"] and given["world_size"] not in {None, size}:
        raise ValueError(
            f"world_size={given['world_size']} with debug={given['debug']!r}: allowed: ranks on this machine only"
        )


def _check_inline(given: Mapping[str, Any]) -> None:
    others = {"engine": None, "ranks": None, "keep": None, "max_restarts": 0, "debug": False, "deadline": None}
    for name, usual in {**others, "log_dir": None, "stop_on": None, "slow": None}.items() if given["inline"] else ():
        if given[name] != usual:
            raise ValueError(f"{name}={given[name]!r} with inline=True: allowed: {usual!r}; nothing but the function "
                             f"runs, in this process")  # fmt: skip


def _check_features(given: Mapping[str, Any]) -> None:
    for feature in FEATURES:
        refused = {"ranks": feature.instead and "these ranks were started without it",
                   "keep": feature.one_call and "these ranks stay"}  # fmt: skip
        for other, why in refused.items():
            if why and given[other] is not None and feature.asks(given):
                name = feature.options[0]
                own = "" if feature.one_call else f"Ranks(..., {name}=...), or "
                raise ValueError(
                    f"{name}={given[name]!r} with {other}=: {why}; allowed: {own}a call with ranks of its own"
                )


def _check_lease(given: Mapping[str, Any]) -> None:
    if not any(feature.asks(given) for feature in with_hook("caller.acquire")):
        return
    why = (
        f"lease={given['lease']} with n_gpus={given['n_gpus']}, devices={given['devices']}, "
        f"concurrent={given['concurrent']}"
    )
    for name in ("engine", "ranks"):
        if given[name] is not None:
            held = "; calls of submit, map and grid have machines= of held ones" if name == "engine" else ""
            raise ValueError(f"{name}= with a lease ({why}): leases are for ranks of a call's own on this machine; "
                             f"leave one of the two out{held}")  # fmt: skip
    size = given["n_gpus"] or (None if given["devices"] is None else len(given["devices"]))
    if given["rank_start"] > 0 or (given["world_size"] is not None and given["world_size"] != size):
        raise ValueError(
            f"world_size={given['world_size']} with a lease ({why}): two launches could each have devices of one "
            f"machine, and wait for ever for those that the other has; allowed: launches on one machine"
        )
