"""Run by tests under other launchers: joins them, in the way that the first argument says, and prints what it is."""

from __future__ import annotations

import json
import logging
import os
import random
import sys

import torch

import mlaunch
from mlaunch import comm


def report() -> dict[str, object]:
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    return {
        "rank": comm.get_rank(),
        "size": comm.get_world_size(),
        "local_rank": comm.get_local_rank(),
        "local_size": comm.get_local_size(),
        "total": total.item(),
        "everyone": comm.all_gather(os.getpid()),
        "device": str(mlaunch.device()),
        "random": [random.random(), torch.rand(1).item()],
    }


@mlaunch.launcher(n_gpus=2, seed=7)
def decorated(scale: int) -> dict[str, object]:
    return {**report(), "scale": scale}


@mlaunch.launcher(results="rank0")
def decorated_for_rank0() -> int:
    return comm.get_rank()


def main(how: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    if how == "decorator":
        decorated(1)
        values = decorated(2)  # a second call finds the group
        only = decorated_for_rank0()
        said = {**values[0], "values": len(values), "rank0": only}
    else:
        seed: int | str = "per-rank:7" if how == "per-rank" else 7
        mlaunch.join_from_env(seed=seed)
        said = report()
    os.write(1, f"{json.dumps(said)}\n".encode())  # in one piece, since the ranks share the stream


main(sys.argv[1])
