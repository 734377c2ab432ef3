"""Models that ranks hold and step across calls are trained as in one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mlaunch import Ranks, launcher
from tests import launches

STEPS = 4


def build(kind: str) -> Any:
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    if kind == "DDP":
        model = DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(state: Any, number: int) -> float:
    model, optimizer = state
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    loss = model(torch.randn(6, 4, generator=generator)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def whole(kind: str) -> list[float]:
    state = build(kind)
    return [step(state, number) for number in range(STEPS)]


def fail_after_a_step(_state: Any) -> None:
    raise ValueError("no such luck")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_a_held_model_is_stepped_across_calls(kind: str) -> None:
    if kind == "FSDP2" and launches.torch_version() < (2, 7):
        pytest.skip("FSDP2 of torch 2.6 does not run on CPUs")
    expected = launcher(whole, 2)(kind)
    with Ranks(n_gpus=2) as ranks:
        state = ranks.hold(build, kind)
        found = []
        for number in range(STEPS):
            found.append(ranks.run(step, state, number))
            with pytest.raises(ValueError, match="no such luck") as caught:
                ranks.run(fail_after_a_step, state)
            assert any("in step and stay" in note for note in caught.value.__notes__)
    assert [list(losses) for losses in zip(*found, strict=True)] == expected
