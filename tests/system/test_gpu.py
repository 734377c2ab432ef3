"""What needs an accelerator; skipped, with that reason, where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import mlaunch
from mlaunch import LaunchError, launcher
from tests.system.commands import run, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator on this machine"),
]


@pytest.fixture(scope="module", autouse=True)
def awake() -> None:
    """Wakes the driver in this process before any test, whose files would be counted as what a test has left."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is not None and kind.type != "toy":  # which has no tensors
        torch.ones(1, device=kind).sum().item()


def where() -> tuple[str, float]:
    device = torch.accelerator.current_accelerator()
    value = torch.ones(1, device=device)
    dist.all_reduce(value)
    cpu = torch.ones(1)
    dist.all_reduce(cpu)
    return str(value.device), value.item() + cpu.item()


def test_one_rank_per_device_each_on_its_own() -> None:
    count = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator()
    assert launcher(where)() == [(f"{kind}:{i}", 2.0 * count) for i in range(count)]


def test_the_device_of_a_rank() -> None:
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    assert launcher(lambda: str(mlaunch.device()))() == [f"{kind}:{i}" for i in range(count)]
    assert launcher(lambda: str(mlaunch.device()), 2, device_type="cpu")() == ["cpu", "cpu"]


def test_a_caller_that_has_initialised_the_device() -> None:
    torch.ones(1, device=torch.accelerator.current_accelerator())
    assert len(launcher(where, 1)()) == 1
    with pytest.raises(RuntimeError, match="start_method='fork': this process has initialised"):
        launcher(where, 1, start_method="fork")()


def test_counting_devices_wakes_no_driver_in_the_caller() -> None:
    code = (
        "from mlaunch import launcher; import torch; launcher(lambda: None)();"
        "print(torch.get_device_module().is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_device_tensors_come_back_on_the_cpu() -> None:
    def make() -> tuple[torch.Tensor, torch.nn.Module]:
        device = torch.accelerator.current_accelerator()
        return torch.arange(100_000, device=device), torch.nn.Linear(200, 200).to(device)

    [(tensor, module)] = launcher(make, 1)()
    assert tensor.device.type == "cpu"
    assert torch.equal(tensor, torch.arange(100_000))
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}


def test_a_picked_device_is_device_0_of_its_rank() -> None:
    last = torch.accelerator.device_count() - 1
    [(name, _)] = launcher(where, devices=[last])()
    assert name.endswith(":0")


def test_running_out_of_memory_is_catchable() -> None:
    def greedy() -> None:
        torch.empty(2**50, device=torch.accelerator.current_accelerator())

    with pytest.raises(torch.OutOfMemoryError) as caught:
        launcher(greedy, 1)()
    assert isinstance(caught.value.__cause__, LaunchError)


def test_more_devices_than_there_are() -> None:
    with pytest.raises(ValueError, match=r"device\(s\) are visible here; allowed: 1 to"):
        launcher(where, torch.accelerator.device_count() + 1)()


@pytest.mark.parametrize("virtual", [False, True])
def test_the_command(tmp_path: Path, virtual: bool) -> None:
    script = write(tmp_path, """
import os, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
value = torch.ones(1, device="cuda")
dist.all_reduce(value)
print(int(value), os.environ["LOCAL_RANK"], torch.cuda.device_count())
dist.destroy_process_group()
""")  # fmt: skip
    count = torch.accelerator.device_count()
    done = run(tmp_path, "--nproc-per-node", "gpu", *(["--virtual-local-rank"] if virtual else []), script)
    expected = [f"{count} 0 1" if virtual else f"{count} {rank} {count}" for rank in range(count)]
    assert sorted(done.stdout.splitlines()) == sorted(expected), done.stderr
