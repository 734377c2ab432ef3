"""The entry of a forked rank."""

from __future__ import annotations

import os
import traceback
from typing import NoReturn

from mlaunch.base import own_process
from mlaunch.core import load
from mlaunch.rank.base import Rank, RankArgs
from mlaunch.rank.function import FunctionRank
from mlaunch.rank.setup import process


def run(args: RankArgs) -> NoReturn:
    """Run a rank, and end the process: the frames above belong to the fork server."""
    code = 1  # an error in the lines below must not look like success
    try:
        code = _rank(args).live()
    except BaseException:  # an error of mlaunch, or in reporting the user's: its text must not be lost
        traceback.print_exc()
    finally:
        try:
            process.flush()
            # The last thread of a process frees its memory; gloo's threads, which slept on other cores, did so for one
            # rank after the other.
            if args.spec.local_world_size <= own_process.core_count():  # with more ranks no core is idle
                own_process.end_on_one_core(os.getppid() + args.local_rank)
        finally:
            os._exit(code)


def _rank(args: RankArgs) -> Rank:
    if args.spec.stays:
        kept: Rank = load.module_of("ranks", "rank.kept").KeptRank(args)
        return kept
    if args.spec.target is None:
        return FunctionRank(args)
    rank: Rank = load.module_of(args.spec.target.feature, "rank").rank(args, args.spec.target)
    return rank
