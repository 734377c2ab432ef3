"""Scripts in the style of the three originals, ported by their import lines only: on 2 CPU ranks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.imported import IMPORTED
from tests.users import users_environ

# Each trains the same regression on shards of the same data; the loss of the full data ends below 0.05 on every rank.

DETECTRON2 = """
import argparse, json, logging
import torch
from torch.nn.parallel import DistributedDataParallel

import mlaunch.comm as comm          # was: import detectron2.utils.comm as comm
from mlaunch import launch# was: from detectron2.engine import launch

logger = logging.getLogger("plain_train")

def do_test(model, x, y):
    with torch.no_grad():
        mine = torch.nn.functional.mse_loss(model(x[comm.get_rank()::comm.get_world_size()]),
                                            y[comm.get_rank()::comm.get_world_size()])
    gathered = comm.gather(mine.item(), dst=0)
    comm.synchronize()
    return sum(gathered) / len(gathered) if comm.is_main_process() else None

def do_train(args, model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for _ in range(args.iterations):
        shard = slice(comm.get_rank(), None, comm.get_world_size())
        losses = {"loss_mse": torch.nn.functional.mse_loss(model(x[shard]), y[shard])}
        total = sum(losses.values())
        reduced = {k: v.item() for k, v in comm.reduce_dict(losses).items()}
        assert abs(reduced["loss_mse"]) < 1e6
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        if comm.is_main_process():
            logger.debug("loss %s", sum(reduced.values()))

def main(args):
    torch.manual_seed(comm.shared_random_seed() % 7)
    x = torch.randn(64, 3)
    y = x @ torch.tensor([[1.0], [2.0], [3.0]])
    model = torch.nn.Linear(3, 1)
    if comm.get_world_size() > 1:
        model = DistributedDataParallel(model, broadcast_buffers=False)
    do_train(args, model, x, y)
    loss = do_test(model, x, y)
    if comm.is_main_process():
        assert comm.get_local_rank() == 0 and comm.get_local_size() == args.num_gpus
        print(json.dumps([loss]))

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-gpus", type=int, default=1)
    parser.add_argument("--num-machines", type=int, default=1)
    parser.add_argument("--machine-rank", type=int, default=0)
    parser.add_argument("--dist-url", default="auto")
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--iterations", type=int, default=60)
    args = parser.parse_args()
    launch(main, args.num_gpus, num_machines=args.num_machines, machine_rank=args.machine_rank,
           dist_url=args.dist_url, args=(args,))
"""

MEGENGINE = """
import json
import torch                          # was: import megengine as mge

import mlaunch as dist                # was: import megengine.distributed as dist

n_gpus = 2

@dist.launcher(n_gpus=n_gpus)
def train():
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)           # different on purpose: the broadcast makes them alike
    model = torch.nn.Linear(3, 1)
    dist.bcast_list_(list(model.parameters()), dist.WORLD)
    callback = dist.make_allreduce_cb("mean", dist.WORLD)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(callback)
    torch.manual_seed(7)
    x = torch.randn(64, 3)
    y = x @ torch.tensor([[1.0], [2.0], [3.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[rank::size]), y[rank::size]).backward()
        optimizer.step()
    dist.group_barrier()
    if rank == 0:
        dist.get_client().user_set("message", "trained")
    assert dist.get_client().user_get("message") == "trained"
    return torch.nn.functional.mse_loss(model(x), y).item()

if __name__ == "__main__":
    print(json.dumps(train()))
"""

COLOSSALAI = """
import argparse, json, os
import torch
from torch.nn.parallel import DistributedDataParallel

import mlaunch                        # was: import colossalai

def main():
    mlaunch.join_from_torch(seed=42)  # was: colossalai.launch_from_torch(seed=42)
    rank, size = mlaunch.get_rank(), mlaunch.get_world_size()
    x = torch.randn(64, 3)            # the same on all ranks: join seeded them
    y = x @ torch.tensor([[1.0], [2.0], [3.0]])
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[rank::size]), y[rank::size]).backward()
        optimizer.step()
    loss = torch.nn.functional.mse_loss(model(x), y).item()
    os.write(1, (json.dumps([loss]) + chr(10)).encode())

if __name__ == "__main__":
    main()
"""


@pytest.mark.nightly("ColossalAI", "detectron2", "MegEngine")
@pytest.mark.parametrize(
    ("text", "arguments", "launcher", "losses"),
    [
        pytest.param(DETECTRON2, ["--num-gpus", "2"], [], 1, id="detectron2"),
        pytest.param(DETECTRON2, ["--num-gpus", "1"], [], 1, id="detectron2-alone"),
        pytest.param(MEGENGINE, [], [], 2, id="MegEngine"),
        pytest.param(COLOSSALAI, [], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], 2,
                     id="ColossalAI"),
    ],
)  # fmt: skip
def test_a_port(tmp_path: Path, text: str, arguments: list[str], launcher: list[str], losses: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    done = subprocess.run(
        [IMPORTED, *launcher, script, *arguments],
        capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path,
        env={**users_environ(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    # torch's own, at the end of a process of torchrun that used autograd: about 1 plain script in 24 on a busy machine.
    aborted = "terminate called without an active" in done.stderr and "Signal 6 (SIGABRT)" in done.stderr
    assert done.returncode == 0 or (launcher and aborted), done.stderr
    printed = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]  # by rank 0, or by the script itself
    found = [loss for line in printed if line.startswith("[") for loss in json.loads(line)]
    assert len(found) == losses
    assert max(found) < 0.05
