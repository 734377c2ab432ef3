"""``slow=``: a rank for which the others wait is named, by what each has waited for itself."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import pytest

from mlaunch import Ranks, launcher
from tests import launches, schema

STEP = 0.05  # seconds


def train(seconds: float, slowed: int | None, *, model: bool) -> int:
    import torch
    import torch.distributed as dist

    rank, steps, ends = dist.get_rank(), 0, time.monotonic() + seconds
    goes_on = torch.ones(1)
    wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8)) if model else None
    while goes_on.item():
        time.sleep(STEP * (1.5 if rank == slowed else 1))
        if wrapped is not None:
            wrapped(torch.ones(4, 8)).sum().backward()
        goes_on[0] = time.monotonic() < ends
        if wrapped is None or steps % 8 == 0:
            dist.all_reduce(goes_on, dist.ReduceOp.MIN)
        steps += 1
        goes_on[0] = 1.0 if steps % 8 and wrapped is not None else goes_on[0]
    return steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["collectives", "a model"]
)
def test_a_slow_rank_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *, model: bool
) -> None:
    """To the user, once; in ``mlaunch ps`` and ``why`` meanwhile; in the report."""
    pytest.importorskip("torch", reason="the ranks' collectives are torch's")
    launches.hurry_slow(monkeypatch, 3.0)
    call, said, why = launcher(train, 3, device_type="cpu", slow="10%"), dict[str, str](), list[str]()

    def look() -> None:
        while not done.wait(0.5):
            if "is last into" in (told := call.why()):
                why.append(told)
                said["ps"] = subprocess.run(
                    [sys.executable, "-m", "mlaunch", "ps"], check=True, capture_output=True, text=True
                ).stdout
                return

    done = threading.Event()
    looking = threading.Thread(target=look)
    looking.start()
    try:
        call(25.0 if model else 9.0, 1, model=model)  # the first model of a process imports for seconds
    finally:
        done.set()
        looking.join()
    assert call.last is not None
    found = call.last.slow_ranks
    assert found is not None
    assert found.ranks == (1,)
    assert 0.1 < found.share < 0.6
    assert found.text.startswith("rank 1 is last into ")
    assert capfd.readouterr().err.count("train(): rank 1 is last into") == 1
    assert "slow: rank 1 is last into" in why[0]
    assert "\n  slow: rank 1 is last into" in said["ps"]
    assert found.text in str(call.last)
    schema.check(json.loads(json.dumps(call.last.as_dict())), "report")


@pytest.mark.slow
@pytest.mark.nightly
def test_healthy_ranks_are_not(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="the ranks' collectives are torch's")
    launches.hurry_slow(monkeypatch, 2.0)
    call = launcher(train, 3, device_type="cpu", slow="25%")
    call(5.0, None, model=False)
    assert call.last is not None
    assert call.last.slow_ranks is None
    assert call.last.as_dict()["slow_ranks"] is None
    assert "last into" not in capfd.readouterr().err


def test_where_it_is_not() -> None:
    with (
        pytest.raises(ValueError, match=r"slow .*it compares the ranks of one call"),
        Ranks(n_gpus=1, slow="10%"),
    ):
        pass
    with pytest.raises(ValueError, match=r"slow='10%' with submit\(\): allowed: None"):
        launcher(int, 1, device_type="cpu", slow="10%").submit()
    with pytest.raises(ValueError, match=r"slow='10%' with ranks on several machines: only ranks of one machine are"):
        launcher(int, 1, device_type="cpu", slow="10%", world_size=2, port=1)()
