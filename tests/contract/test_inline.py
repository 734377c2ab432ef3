"""``inline=True``: the function runs in this process, as a rank would, and leaves nothing there."""

from __future__ import annotations

import os
import random
import sys

import pytest
import torch
import torch.distributed as dist

import mlaunch
from mlaunch import Ranks, comm, launcher
from tests import launches

pytestmark = pytest.mark.skipif(
    not launches.leaves_no_descriptors(), reason="with this torch descriptors of a group stay when it is left"
)


def test_a_call_in_this_process() -> None:
    seen: list[object] = []

    @launcher(n_gpus=4, device_type="cpu", seed=3, env={"MINE": "1"}, timeout=60, inline=True)
    def train(scale: float) -> float:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MINE")
        seen.extend([os.getpid(), *(os.environ[name] for name in names), comm.get_world_size(), str(mlaunch.device())])
        total = torch.tensor(scale)
        dist.all_reduce(total)
        dist.barrier(dist.new_group())
        assert torch.initial_seed() == 3
        return total.item()

    before = dict(os.environ)
    assert train(2.0) == [2.0]
    assert train(3.0) == [3.0]
    assert seen[:8] == [os.getpid(), "0", "1", "0", "1", "1", 1, "cpu"]
    assert dict(os.environ) == before
    assert not dist.is_initialized()


def test_the_callers_generators_go_on_where_they_were() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), torch.rand(1).item(), float(np.random.rand())

    np = pytest.importorskip("numpy")
    inside: list[object] = []
    train = launcher(lambda: inside.append(draw()), device_type="cpu", seed=3, inline=True)
    hook = sys.excepthook
    wanted, found = [], []
    for calls in (0, 1):
        for seed in (random.seed, torch.manual_seed, np.random.seed):
            seed(1)
        for _ in range(2):
            (found if calls else wanted).append(draw())
            [train() for _ in range(calls)]
    assert found == wanted
    assert inside[0] == inside[1]
    assert sys.excepthook is hook


def test_a_failure_is_raised_as_it_is() -> None:
    error = ValueError("no such luck")

    @launcher(device_type="cpu", inline=True)
    def train() -> None:
        raise error

    with pytest.raises(ValueError, match="no such luck") as caught:
        train()
    assert caught.value is error
    assert not dist.is_initialized()
    assert "RANK" not in os.environ


def test_where_it_cannot_run() -> None:
    train = launcher(print, device_type="cpu", inline=True)
    with pytest.raises(RuntimeError, match=r"print\(\) with inline=True in a process that is in a process group alrea"):
        launcher(train, device_type="cpu", inline=True)()
    with pytest.raises(ValueError, match="device_type='xpu' with inline=True: this machine has"):
        train.options(device_type="xpu")()
    with pytest.raises(ValueError, match=r"backend='none': torch .* offers"):
        train.options(backend="none")()
    with pytest.raises(ValueError, match=r"inline=True with submit\(\): allowed: a blocking call"):
        train.submit()
    with pytest.raises(ValueError, match="Ranks does not take inline"):
        Ranks(n_gpus=2, inline=True)
    assert not dist.is_initialized()
