"""Calls of a decorated function in a process that is a rank already: it joins the other ranks, or refuses.

A process that torchrun, srun, mpirun or submitit has started joins and runs the function itself. A rank of mlaunch
refuses: each rank would start as many ranks again, which is hardly ever meant.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from mlaunch.base import seeding
from mlaunch.base.exceptions import misuse
from mlaunch.caller.options.launch_options import Options
from mlaunch.protocol import this_rank
from mlaunch.rank.launcher_variables import RankInfo, recognise


def place_to_join(options: Options, name: str) -> RankInfo | None:
    """Return the place of this process, if a call must not start ranks of its own; None: it starts them.

    Raises:
        RuntimeError: This process is a rank of mlaunch.
        ValueError: It is a rank of another launcher, with another world size than the options ask for.
    """
    if not options.join:
        return None
    rank = this_rank.this_rank
    if rank is not None:
        raise misuse(
            RuntimeError(
                f"{name}() is called inside rank {rank.rank} of {rank.function}, which is launched already. To "
                f"run it in this rank only, call {name}.__wrapped__(...); to start new ranks from here, decorate it "
                f"with @launcher(..., join=False)"
            )
        )
    place = recognise(os.environ) if options.engine is None else None  # an engine places ranks elsewhere
    if place is not None and place.world_size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        return None  # variables for a group of one, set by hand in a notebook
    if place is None or options.world_size in {None, place.world_size}:
        return place
    if place.launcher == "srun":  # one task per machine, each of which starts that machine's ranks
        return None
    raise misuse(
        ValueError(
            f"world_size={options.world_size}, but {place.launcher} started this process as rank {place.rank} of "
            f"{place.world_size}, and {name}() would join those; allowed: {place.world_size}, None, or join=False"
        )
    )


def rank_of_process() -> str:
    """Return which rank this process is: "rank 0 of train()", "rank 3 of srun"; "" if it is none."""
    rank, place = this_rank.this_rank, recognise(os.environ)
    if rank is not None:
        return f"rank {rank.rank} of {rank.function}"
    if place is None or (place.world_size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ):
        return ""
    return f"rank {place.rank} of {place.launcher}"


def run_joined(
    options: Options, place: RankInfo, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """Join the other ranks, unless an earlier call did, and run the function here; return a list of one value."""
    import torch.distributed as dist

    from mlaunch.rank.become_rank import become_rank

    for feature in options.features:
        if feature.instead:
            given = f"{feature.options[0]}={getattr(options, feature.options[0])!r}"
            raise misuse(ValueError(f"{given} in {rank_of_process()}, which mlaunch has not started; allowed: "
                                    f"{feature.instead}, or join=False"))  # fmt: skip
    if not dist.is_initialized():
        become_rank(place, backend=options.backend, timeout=options.timeout_seconds)
    if options.seed is not None:
        seeding.apply(seeding.of_rank(options.seed, place.rank))
    value = function(*args, **kwargs)
    return [value if options.results == "all" or place.rank == 0 else None]


def refuse_in_bootstrap(name: str) -> None:
    """Raise RuntimeError in a process that multiprocessing spawns, while it imports the script."""
    # multiprocessing imports the main script in each process that it spawns, and sets this while it does.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise misuse(
            RuntimeError(
                f"{name}() is called while multiprocessing imports this script into a process of its own; "
                f"put the call under if __name__ == '__main__':"
            )
        )
