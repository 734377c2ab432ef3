"""The memory of devices: when it is back after a death, how fast tensors travel, and that nothing grows."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from mlaunch import Held, LaunchError, Ranks, launcher
from tests.gpu.figures import MARK
from tests.gpu.place import KIND, check, count, needs_tensors, place

SHARE = 0.9  # of what is free
SLACK = 64 * 2**20  # bytes by which a device may differ from what it was
PATIENCE = 30.0  # seconds
TRAVELS = 2 * 2**30  # bytes of a tensor that travels
LAUNCHES = 5  # in a row, each of which takes nearly all memory


def free() -> int:
    """Returns the bytes that are free on the current device, whichever process has the others."""
    return int(torch.cuda.mem_get_info()[0])


def fill(share: float) -> torch.Tensor:
    return torch.ones(int(free() * share), dtype=torch.uint8, device=place())


def fill_and_return() -> float:
    return float(fill(SHARE)[-1].item())


def want_too_much() -> None:
    kept = fill(SHARE)
    fill(20.0)
    del kept


def die_with_much() -> None:
    kept = fill(SHARE)
    torch.accelerator.synchronize()
    os.kill(os.getpid(), signal.SIGKILL)
    del kept


def die_with_its_agent() -> None:
    """Leave nobody who would wait until the device has its memory back, before the lease is over."""
    kept = fill(SHARE)
    torch.accelerator.synchronize()
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()
    del kept


def is_listed() -> bool | None:
    """True if NVIDIA's library lists this rank on its device by its own number; None: it cannot be asked."""
    with contextlib.suppress(Exception):
        nvml = importlib.import_module("pynvml")
        kept = fill(0.1)
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        pids = [one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        del kept
        return os.getpid() in pids
    return None


def return_soon(before: int, what: str) -> bool:
    """Says how long it took until so much was free again; False if it never was."""
    begun = time.perf_counter()
    while (now := free()) < before - SLACK:
        if time.perf_counter() - begun > PATIENCE:
            print(f"{MARK}{what:<44} {(before - now) / 2**30:.1f} GiB were not free after {PATIENCE:.0f} s")
            return False
    print(f"{MARK}{what:<44} {(time.perf_counter() - begun) * 1000:10.1f} ms")
    return True


def returned() -> None:
    """Memory after an error, after a kill, and for launches in a row that hold a lease."""
    needs_tensors()
    torch.ones(1, device=place())  # this process has a context from here on
    before = free()
    for function, what in ((want_too_much, "OutOfMemoryError"), (die_with_much, "SIGKILL")):
        try:
            launcher(function, 1)()
        except Exception as error:
            report = error if isinstance(error, LaunchError) else error.__cause__
            print(str(report).partition("\n")[0])
            check(isinstance(report, LaunchError), f"{what} fails the call with a report")
            if what == "OutOfMemoryError":
                check(isinstance(error, torch.OutOfMemoryError), "the caller sees the rank's own exception")
        else:
            check(False, f"{what} fails the call")
        check(return_soon(before, f"memory is free after {what}"), f"memory is back after {what}")
    leased = launcher(fill_and_return, 1, lease=True)
    check([leased() for _ in range(LAUNCHES)] == [[1.0]] * LAUNCHES, f"{LAUNCHES} launches in a row take 90% each")
    print(f"NVIDIA's library lists a rank by its own number: {launcher(is_listed, 1)()[0]}")
    for _ in range(LAUNCHES):
        killed, after = launcher(die_with_its_agent, 1, lease=True).submit(), leased.submit()
        check(isinstance(killed.exception(), LaunchError), "a launch whose agent is killed fails")
        check(after.result() == [1.0], "the launch that waited for its device has 90% of it, once its lease is over")


# Tensors that travel


def make(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8, device=place())


def make_pinned(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8, pin_memory=True)


def make_in_graph(size: int) -> torch.Tensor:
    """Returns a tensor from the private pool of a captured graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.ones(size, dtype=torch.uint8, device=place())
    graph.replay()
    return captured


def take(tensor: torch.Tensor) -> tuple[str, float]:
    return tensor.device.type, float(tensor[-1].item())


def gigabytes(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return TRAVELS / (time.perf_counter() - begun) / 1e9


def one_copy() -> float:
    """Returns the GB/s of a copy into pinned memory, which nothing can be faster than."""
    source, target = make(TRAVELS), torch.empty(TRAVELS, dtype=torch.uint8, pin_memory=True)

    def copy() -> None:
        target.copy_(source)
        torch.accelerator.synchronize()

    copy()
    return gigabytes(copy)


def travel() -> None:
    """Values and arguments on devices, in GB/s, against one copy into pinned memory."""
    needs_tensors()
    print(f"{MARK}{TRAVELS / 2**30:.0f} GiB of one rank; one copy into pinned memory: {one_copy():.1f} GB/s")
    torch.cuda.empty_cache()
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for what, function, environ in (
        ("a value on the device", make, {}),
        ("the same, expandable segments", make, expandable),
        ("a value in pinned memory", make_pinned, {}),
        ("a value of a graph's pool", make_in_graph, {}),
    ):
        with Ranks(n_gpus=1, env=environ) as ranks:
            ranks.run(function, 1)
            found: list[torch.Tensor] = []
            speed = gigabytes(
                lambda ranks=ranks, function=function, found=found: found.extend(ranks.run(function, TRAVELS))
            )  # type: ignore[misc]
            check(found[0].device.type == "cpu" and found[0][-1].item() == 1, f"{what} arrives, on the CPU")
            print(f"{MARK}{what:<44} {speed:10.1f} GB/s")
    given = make(TRAVELS)
    with Ranks(n_gpus=1) as ranks:
        ranks.run(take, given[:1])
        speed = gigabytes(lambda: print(f"an argument on {KIND} arrives as", *ranks.run(take, given)))
        print(f"{MARK}{'an argument on the device':<44} {speed:10.1f} GB/s")


# What stays


def hold_more() -> torch.Tensor:
    return torch.ones(2**26, dtype=torch.uint8, device=place())


def in_use() -> tuple[int, int]:
    module: Any = torch.get_device_module(KIND)
    return int(module.memory_allocated()), int(module.memory_reserved())


def growth() -> None:
    """A hundred calls that hold an object each and drop the one before."""
    needs_tensors()
    with Ranks() as ranks:
        held: Held[torch.Tensor] = ranks.hold(hold_more)
        ranks.run(count)
        first = ranks.run(in_use)
        for _ in range(100):
            held = ranks.hold(hold_more)
            ranks.run(count)
        last = ranks.run(in_use)
        print(f"allocated and reserved: {first[0]} at first, {last[0]} after 100 held objects")
        check(all(b[0] - a[0] <= 2**26 for a, b in zip(first, last, strict=True)), "what ranks hold does not grow")
        check(all(b[1] <= 4 * 2**26 + a[1] for a, b in zip(first, last, strict=True)), "nor what they have reserved")
        del held


ALL = {"returned": returned, "travel": travel, "growth": growth}
