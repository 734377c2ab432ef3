"""Groups as they are made of the world's ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import mlaunch
from mlaunch import comm
from tests.contract.test_groups import keeps_order


@keeps_order
def test_the_twin_of_a_group_keeps_its_order() -> None:
    @mlaunch.launcher(n_gpus=2)
    def train() -> Any:
        from mlaunch.comm.rank import exchange, world

        group = world.subgroup([1, 0], "cuda:gloo")  # for accelerators alone
        return dist.get_process_group_ranks(exchange.cpu_group(group)), comm.all_gather(mlaunch.get_rank(), group)

    assert train() == [([1, 0], [1, 0])] * 2


def test_an_order_that_an_older_torch_would_lose_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlaunch.comm.rank import world

    def new_group(ranks: list[int], backend: str | None = None, use_local_synchronization: bool = False) -> None:
        """As torch's was."""

    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises(ValueError, match=r"torch .* forms groups of ascending ranks; allowed: \[0, 2\]"):
        world.subgroup([2, 0], None)
