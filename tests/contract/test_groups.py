"""MegEngine's names, and detectron2's ``launch``."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mlaunch
from mlaunch import comm
from tests.contract.functions import error_of


def test_a_world_of_one() -> None:
    assert not mlaunch.is_distributed()
    assert (mlaunch.get_rank(), mlaunch.get_world_size(), mlaunch.get_local_device_id()) == (0, 1, 0)
    assert mlaunch.get_backend() is None
    assert (mlaunch.WORLD.size, mlaunch.WORLD.rank, mlaunch.WORLD.key) == (1, 0, "0")
    assert mlaunch.WORLD.is_single_machine
    assert mlaunch.new_group([0]) is mlaunch.WORLD
    mlaunch.group_barrier()
    tensor = torch.ones(2)
    mlaunch.bcast_list_([tensor])
    assert mlaunch.make_allreduce_cb("mean")(tensor, tensor) is tensor
    assert mlaunch.synchronized(lambda x: x + 1)(1) == 2
    with pytest.raises(RuntimeError, match="there is no process group here"):
        mlaunch.get_client()
    with pytest.raises(RuntimeError, match="the address of the ranks' server is not known here: MASTER_ADDR is not"):
        mlaunch.get_py_server_addr()


def test_who_am_i() -> None:
    @mlaunch.launcher(n_gpus=2, device_type="cpu")
    def train() -> Any:
        return (
            mlaunch.get_rank(), mlaunch.get_world_size(), mlaunch.get_local_device_id(), mlaunch.get_backend(),
            mlaunch.is_distributed(), mlaunch.WORLD.key, mlaunch.WORLD.is_single_machine, repr(mlaunch.WORLD),
        )  # fmt: skip

    shown = "<Group of ranks 0,1; torch takes its .process_group>"
    assert train() == [(rank, 2, rank, "gloo", True, "0,1", True, shown) for rank in range(2)]


def test_torch_given_a_group_says_what_to_give() -> None:
    @mlaunch.launcher(n_gpus=1, device_type="cpu")
    def train() -> None:
        dist.all_reduce(torch.ones(1), group=mlaunch.new_group([0]))  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=r"<Group of ranks 0; torch takes its \.process_group>"):
        train()


keeps_order = pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="this torch sorts the ranks of a group"
)


@keeps_order
def test_groups() -> None:
    @mlaunch.launcher(n_gpus=3)
    def train() -> Any:
        if mlaunch.get_rank() == 1:
            return error_of(lambda: mlaunch.new_group([0, 2]))
        with mlaunch.override_backend("gloo"):
            group = mlaunch.new_group([2, 0])
        tensor = torch.tensor([float(mlaunch.get_rank() + 1)])
        mlaunch.bcast_list_([tensor], group)
        mlaunch.group_barrier(group)
        gathered = comm.all_gather(mlaunch.get_rank(), group.process_group)
        at_first = comm.gather(mlaunch.get_rank(), 0, group.process_group)
        sent = comm.broadcast_object(mlaunch.get_rank(), 1, group.process_group)
        return group.size, group.rank, group.key, group.is_single_machine, tensor.item(), gathered, at_first, sent

    first, second, third = train()
    assert second == "ValueError: new_group([0, 2]): this is rank 1; only the group's members may call it"
    # In the order given, as MegEngine's: rank 2 is the group's first, and its root.
    assert first == (2, 1, "2,0", True, 3.0, [2, 0], [], 0)
    assert third == (2, 0, "2,0", True, 3.0, [2, 0], [2, 0], 0)


def test_a_group_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"new_group\(\[0, 0\]\): allowed: different ranks from 0 to 0"):
        mlaunch.new_group([0, 0])
    with pytest.raises(ValueError, match="reduce_method='max': allowed: 'mean', 'sum'"):
        mlaunch.make_allreduce_cb("max")


def test_gradients_are_reduced() -> None:
    @mlaunch.launcher(n_gpus=2)
    def train() -> Any:
        parameter = torch.nn.Parameter(torch.ones(2) * mlaunch.get_rank())
        mlaunch.bcast_list_([parameter])
        parameter.register_post_accumulate_grad_hook(mlaunch.make_allreduce_cb("MEAN"))
        (parameter * (mlaunch.get_rank() + 1)).sum().backward()
        total = mlaunch.make_allreduce_cb("sum")(parameter, torch.ones(1))
        return parameter.tolist(), parameter.grad.tolist(), total.item()

    assert train() == [([0.0, 0.0], [1.5, 1.5], 2.0)] * 2


def test_a_backend_is_overridden_inside_alone() -> None:
    @mlaunch.launcher(n_gpus=2)
    def train() -> Any:
        with mlaunch.override_backend("nonesuch"):
            inside = error_of(lambda: mlaunch.new_group([0, 1]))
        return "nonesuch" in inside.lower(), mlaunch.new_group([0, 1]).size

    assert train() == [(True, 2)] * 2


def test_synchronized_waits_for_all() -> None:
    @mlaunch.launcher(n_gpus=2)
    def train() -> int:
        client = mlaunch.get_client()

        @mlaunch.synchronized
        def work() -> None:
            client.user_set(f"done {mlaunch.get_rank()}", True)

        work()
        return int(client.user_get(f"done {1 - mlaunch.get_rank()}", 0.01))

    assert train() == [1, 1]


# detectron2's launch


def main(scale: int, offset: int) -> Any:
    dist.barrier()
    group = comm.get_local_process_group()
    return comm.get_rank() * scale + offset, comm.get_local_rank(), dist.get_world_size(group)


@pytest.mark.parametrize("url", [None, "auto", "file:///nowhere/at/all"])
def test_launch(url: str | None) -> None:
    assert mlaunch.launch(main, 2, dist_url=url, args=(10, 1), timeout=60) == [(1, 0, 2), (11, 1, 2)]


def test_launch_at_a_port() -> None:
    with mlaunch.Server() as server:  # a port that is free once the server has ended
        port = server.py_server_port
    assert mlaunch.launch(main, 2, dist_url=f"tcp://127.0.0.1:{port}", args=(10, 1)) == [(1, 0, 2), (11, 1, 2)]


def test_the_backend_of_a_launch() -> None:
    """Code that descends from detectron2's passes it by name."""

    def asked() -> str:
        return str(dist.get_backend())

    assert mlaunch.launch(asked, 2, dist_url="auto", backend="gloo") == ["gloo"] * 2
    with pytest.raises(ValueError, match="backend='nonesuch'"):
        mlaunch.launch(asked, 2, backend="nonesuch")
    with pytest.raises(TypeError, match="backend=7"):
        mlaunch.launch(asked, 2, backend=7)  # type: ignore[arg-type]


def test_a_world_of_one_runs_here() -> None:
    here = object()
    assert mlaunch.launch(lambda x: (x, dist.is_initialized()), 1, args=(here,)) == [(here, False)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_machines": 2}, "dist_url=None with num_machines=2: the machines cannot find each other by this; give "
                              "machine 0's address and a free port there: dist_url='tcp://10.0.0.1:29500'"),
        ({"num_machines": 2, "dist_url": "auto"}, "dist_url='auto' with num_machines=2: the machines cannot find"),
        ({"num_machines": 2, "machine_rank": 2}, r"machine_rank=2: allowed of 2 machine\(s\): 0 to 1"),
        ({"num_gpus_per_machine": 0}, "num_gpus_per_machine=0: allowed: whole numbers from 1"),
        ({"dist_url": "tcp://host"}, "dist_url='tcp://host': allowed: 'auto', 'tcp://host:port', 'file://...', or"),
        ({"dist_url": "tcp://host:99999"}, "dist_url='tcp://host:99999': allowed: 'auto'"),
        ({"dist_url": "http://host:80"}, "dist_url='http://host:80': allowed: 'auto'"),
    ],
)  # fmt: skip
def test_launch_refuses(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mlaunch.launch(main, **{"num_gpus_per_machine": 2, **arguments})
