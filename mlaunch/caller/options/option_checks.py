"""Options that do not go together, and what does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

HIGHEST_PORT = 65535


def check_together(given: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError that names the options, their values and what is allowed."""
    _check_log_dir(given)
    _check_size(given)
    _check_ranks(given)
    _check_engine(given)


def _check_log_dir(given: Mapping[str, Any]) -> None:
    if given["log_dir"] is not None and (
        not isinstance(given["log_dir"], str | os.PathLike) or given["output"] == "raw"
    ):
        raise ValueError(
            f"log_dir={given['log_dir']!r} with output={given['output']!r}: allowed: a path, unless output='raw' "
            f"leaves their streams to the ranks"
        )


def _check_size(given: Mapping[str, Any]) -> None:
    if given["devices"] is not None and given["n_gpus"] not in {None, len(given["devices"])}:
        raise ValueError(
            f"n_gpus={given['n_gpus']} with devices={list(given['devices'])}: allowed: n_gpus={len(given['devices'])}, "
            f"or only one of the two"
        )


def _check_ranks(given: Mapping[str, Any]) -> None:
    size = len(given["devices"]) if given["devices"] is not None else given["n_gpus"]
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
            f"machines={given['machines']} without engine=: nobody is there to place ranks on other machines; give "
            f"one of mlaunch.engines, or start the script on each machine with world_size= and rank_start="
        )
    others = {"world_size": None, "rank_start": 0, "ranks": None, "start_method": "forkserver"}
    for name, usual in others.items() if given["engine"] is not None else ():
        if given[name] != usual:
            raise ValueError(f"{name}={given[name]!r} with engine=: allowed: {usual!r}")
    if given["engine"] is not None and given["output"] == "raw":
        raise ValueError("output='raw' with engine=: ranks elsewhere have no stream of this process; allowed: "
                         "'all', 'rank0', 'none'")  # fmt: skip
