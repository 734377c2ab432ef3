"""Logs from rank 0, and errors from all ranks."""

import logging
import sys

import torch.distributed as dist

import mlaunch

log = logging.getLogger("training")


def set_up_logging():
    shown = logging.StreamHandler(sys.stdout)
    shown.addFilter(mlaunch.RankZeroFilter())
    shown.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[shown])


@mlaunch.launcher(n_gpus=2)
def train():
    set_up_logging()
    log.info("begin with %d ranks", dist.get_world_size())
    if dist.get_rank() == 1:
        log.info("this is rank 1, and nobody sees it")
        log.error("the loss of rank 1 is nan")


train()
