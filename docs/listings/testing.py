import os

import pytest
import torch
import torch.distributed as dist

from mlaunch.pytest import rank_fixture


@pytest.mark.ranks(2)
def test_all_reduce(tmp_path):
    x = torch.ones(3) * dist.get_rank()
    dist.all_reduce(x)
    assert x[0] == 1
    assert tmp_path.exists()  # one directory for all ranks


@pytest.mark.ranks(1, 2)  # two tests: test_size[ranks=1] and test_size[ranks=2]
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_size(dtype):
    x = torch.ones(1, dtype=dtype)
    dist.all_reduce(x)
    assert x.item() == dist.get_world_size()


@rank_fixture(scope="module")
def halves():
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    yield groups[dist.get_rank()]


@rank_fixture(ranks=1)  # set up on one rank; the test on two gets what it returns
def checkpoint(tmp_path):
    torch.save({"saved by": dist.get_world_size()}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


@pytest.mark.ranks(2)
def test_fixtures(halves, checkpoint, monkeypatch):
    monkeypatch.setenv("STEP", "1")  # on this rank, until the end of the test
    assert os.environ["STEP"] == "1"
    assert dist.get_world_size(halves) == 1
    assert torch.load(checkpoint) == {"saved by": 1}
