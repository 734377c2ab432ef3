"""Options that do not go together, and what does."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlaunch.caller.options import Options

HIGHEST_PORT = 65535


def check_together(options: Options) -> None:
    """Raises TypeError or ValueError that names the options, their values and what is allowed."""
    _check_log_dir(options)
    _check_size(options)
    _check_ranks(options)
    _check_engine(options)


def _check_log_dir(options: Options) -> None:
    if options.log_dir is not None and (not isinstance(options.log_dir, str | os.PathLike) or options.output == "raw"):
        raise ValueError(
            f"log_dir={options.log_dir!r} with output={options.output!r}: allowed: a path, unless output='raw' leaves "
            f"their streams to the ranks"
        )


def _check_size(options: Options) -> None:
    if options.devices is not None and options.n_gpus not in {None, len(options.devices)}:
        raise ValueError(
            f"n_gpus={options.n_gpus} with devices={list(options.devices)}: allowed: n_gpus={len(options.devices)}, "
            f"or only one of the two"
        )


def _check_ranks(options: Options) -> None:
    size = len(options.devices) if options.devices is not None else options.n_gpus
    if options.rank_start > 0 and options.port == 0:
        raise ValueError(
            f"rank_start={options.rank_start} with port=0: a machine that joins others must know the port on which "
            f"rank 0's machine listens; allowed: 1 to {HIGHEST_PORT}"
        )
    if options.world_size is not None and options.rank_start + (size or 1) > options.world_size:
        raise ValueError(
            f"rank_start={options.rank_start} with n_gpus={size or 'unset'} and world_size={options.world_size}: "
            f"allowed: rank_start + n_gpus up to world_size"
        )


def _check_engine(options: Options) -> None:
    if options.engine is None and options.machines is not None:
        raise ValueError(
            f"machines={options.machines} without engine=: nobody is there to place ranks on other machines; give "
            f"one of mlaunch.engines, or start the script on each machine with world_size= and rank_start="
        )
    others = {"world_size": None, "rank_start": 0, "keep": None, "ranks": None, "start_method": "forkserver"}
    for name, usual in others.items() if options.engine is not None else ():
        if getattr(options, name) != usual:
            raise ValueError(f"{name}={getattr(options, name)!r} with engine=: allowed: {usual!r}")
    if options.engine is not None and options.output == "raw":
        raise ValueError("output='raw' with engine=: ranks elsewhere have no stream of this process; allowed: "
                         "'all', 'rank0', 'none'")  # fmt: skip
