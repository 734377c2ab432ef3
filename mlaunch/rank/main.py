"""The entry of a forked rank."""

from __future__ import annotations

import os
import traceback
from typing import NoReturn

from mlaunch.base import cores
from mlaunch.core import load
from mlaunch.rank.base import Rank, RankArgs
from mlaunch.rank.function import FunctionRank
from mlaunch.rank.setup import process


def run(args: RankArgs) -> NoReturn:
    """Lives a rank's life. Never returns: what lies above belongs to the process that was forked."""
    code = 1  # unless all went well: an error in the lines below must not look like success
    try:
        code = _rank(args).live()
    except BaseException:  # an error of ours, or in reporting theirs: the text must not be lost
        traceback.print_exc()
    finally:
        try:
            process.flush()
            # The last thread of a process takes its memory down; threads of gloo's that slept on other cores did so
            # for one rank after the other.
            if args.spec.local_world_size <= cores.count():  # with more ranks none of them is idle
                cores.end_on_one(os.getppid() + args.local_rank)
        finally:
            os._exit(code)  # above are the fork server's frames, which must not run here


def _rank(args: RankArgs) -> Rank:
    if args.spec.stays:
        from mlaunch.rank.kept import KeptRank

        return KeptRank(args)
    if args.spec.target is None:
        return FunctionRank(args)
    rank: Rank = load.module_of(args.spec.target.feature, "rank").rank(args, args.spec.target)
    return rank
