"""Stops rank 1 in pdb; ``nc -U debugger`` in another terminal drives it."""

import os
import pdb
import socket
import sys

import torch
import torch.distributed as dist

import mlaunch


def debugger_at(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("waiting at", path)
        stream = listener.accept()[0].makefile("rw")
    os.unlink(path)
    return pdb.Pdb(stdin=stream, stdout=stream)


@mlaunch.launcher(n_gpus=2)
def train(path):
    scale = dist.get_rank() + 1.0
    if dist.get_rank() == 1:
        debugger_at(path).set_trace()
    total = torch.tensor(scale, device=mlaunch.device())
    dist.all_reduce(total)
    return total.item()


print(train(sys.argv[1] if sys.argv[1:] else "debugger"))
