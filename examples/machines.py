"""One launch over several machines. Run on each, with the first machine's address and this machine's number, from 0:

python examples/machines.py 10.0.0.1 0
python examples/machines.py 10.0.0.1 1
"""

import sys

import torch
import torch.distributed as dist

from mlaunch import launcher

GPUS, MACHINES = 2, 2
if len(sys.argv) != 3:
    sys.exit("usage: python examples/machines.py ADDRESS_OF_THE_FIRST NUMBER_OF_THIS_ONE")
address, machine = sys.argv[1], int(sys.argv[2])


@launcher(
    n_gpus=GPUS, world_size=GPUS * MACHINES, rank_start=GPUS * machine, master_ip=address, port=29500, device_type="cpu"
)
def total(x):
    mine = torch.tensor(x) * (dist.get_rank() + 1)
    dist.all_reduce(mine)
    return mine.item()


if __name__ == "__main__":
    # [100.0, 100.0] on both machines: each has the values of its own ranks.
    print(total(10.0))
