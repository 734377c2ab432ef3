"""The parts that look at one thing each. Functions that ranks run are here, too, so that they import them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mlaunch import LaunchError, LaunchTimeout, Ranks, comm, launcher
from tests import launches
from tests.contract.preparing import pids_of, prepared, preparing
from tests.gpu.place import HAS_TENSORS, KIND, check, count, place

BLOCK = 256 * 2**20  # bytes
LISTENING = "0A"
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


# Ports


def listening() -> list[str]:
    """Returns the addresses on which this process listens once its group has worked; collective."""
    value = torch.ones(1, device=place())
    dist.all_reduce(value)
    dist.barrier()
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists() or path.is_symlink()}
    rows = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in own:
                rows.append(fields[1])
    dist.barrier()
    return rows


def ports() -> None:
    found = launcher(listening)()
    for rank, addresses in enumerate(found):
        print(f"rank {rank} listens on {', '.join(addresses) or 'nothing'}")
    addresses = [address.partition(":")[0] for rank in found for address in rank]
    check(all(address in LOOPBACK for address in addresses), f"{len(addresses)} ports of ranks are on loopback alone")


# The caller and its device


def where() -> tuple[str, float]:
    value = torch.ones(1, device=place())
    dist.all_reduce(value)
    return f"{KIND}:{torch.accelerator.current_device_index()}", value.item()


def touched() -> None:
    module: Any = torch.get_device_module(KIND)
    module.set_device(0)
    torch.ones(1, device=place())
    size = count()
    expected = [(f"{KIND}:{rank}", float(size)) for rank in range(size)]
    check(launcher(where)() == expected, f"{size} ranks run after the caller has initialised {KIND}")
    try:
        launcher(where, start_method="fork")()
    except RuntimeError as error:
        check("this process has initialised" in str(error), "start_method='fork' is refused then, and says why")
    else:
        check(False, "start_method='fork' is refused then")


def holds_device(pid: int) -> bool:
    """Tells whether a process has opened a device."""
    if not HAS_TENSORS:
        log = Path(os.environ["TOY_LOG"]).read_text().splitlines()
        return any(line.startswith(f"{pid} takes") for line in log)
    return any(_is_device(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd"))


def _is_device(link: str) -> bool:
    try:
        return os.readlink(link).startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri"))
    except FileNotFoundError:  # closed since, as that by which a process lists its own is
        return False


# Apart from this module, whose first look at devices opens them.
CALLER = """
import os
from mlaunch import launcher
print(len(launcher(os.getpid)()))
links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd")]
print(*[link for link in links if link.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri"))])
"""


def prepared_ones() -> None:
    done = subprocess.run([sys.executable, "-c", CALLER], stdout=subprocess.PIPE, encoding="utf-8", check=True)
    check(done.stdout == f"{count()}\n\n", f"no device is open in a caller {done.stdout!r}")
    with preparing():
        check(all(launcher(has_device)()), "a rank that runs is seen to hold its device")
        ranks = pids_of(prepared())
        server = launches.server_pid()
        for who, pids in (("the fork server", [server]), ("prepared ranks", ranks)):
            check(not any(map(holds_device, pids)), f"no device is open in {who}")
        check(launcher(os.getpid)() == ranks, "the next call is served by the prepared ranks")


def has_device() -> bool:
    torch.ones(1, device=place())
    return holds_device(os.getpid())


# Memory


def block() -> torch.Tensor:
    return torch.ones(BLOCK // 4, device=place())


def allocated() -> int:
    """Returns the bytes that this rank has on its device; without a device, in memory."""
    if HAS_TENSORS:
        module: Any = torch.get_device_module(KIND)
        return int(module.memory_allocated())
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def used_on_device() -> int:
    """Returns the bytes that all processes together use on the first device, as a process of its own sees them."""
    if KIND != "cuda":
        return 0
    code = "import torch; free, total = torch.cuda.mem_get_info(0); print(total - free)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    return int(done.stdout)


def total(held: torch.Tensor) -> float:
    return float(held.sum().item())


def memory() -> None:
    before = used_on_device()
    with Ranks() as ranks:
        empty = ranks.run(allocated)
        held = ranks.hold(block)
        full = ranks.run(allocated)
        check(all(b - a >= 0.9 * BLOCK for a, b in zip(empty, full, strict=True)), "what ranks hold is in memory")
        check(ranks.run(total, held) == [BLOCK / 4] * ranks.world_size, "a later call finds it")
        del held
        ranks.run(comm.get_rank)
        freed = ranks.run(allocated)
        check(
            all(b - a >= 0.9 * BLOCK for a, b in zip(freed, full, strict=True)), "what is dropped here is freed there"
        )
    after = used_on_device()
    print(f"in use on the first device: {before:,} bytes before, {after:,} after")
    check(after - before < BLOCK, "ranks that have ended have given their memory back")


# Failures


def wrong_at_the_end() -> str:
    """Queues work on the last rank that fails on the device, and returns before it has."""
    if HAS_TENSORS and dist.get_rank() == dist.get_world_size() - 1:
        index = torch.full((1,), 10**6, device=place())
        torch.zeros(1, device=place())[index]
    return "returned"


def queued() -> None:
    size = count()
    environ = {} if HAS_TENSORS else {"TOY_FAILS": "an error of queued work"}
    try:
        launcher(wrong_at_the_end, env=environ)()
    except Exception as error:
        report = error if isinstance(error, LaunchError) else error.__cause__
        print(report)
        check(isinstance(report, LaunchError) and report.failures, "the call fails with a report")
        check(
            HAS_TENSORS is False or report.failures[0].rank == size - 1, "the report names the rank whose work it was"
        )
        check("while running the function" in str(report), "the error counts as the function's")
    else:
        check(False, "the call fails")
    check(len(launcher(where)()) == size, "the next call runs")


def wait_for_all() -> None:
    """Waits on the device: for rank 0, which does not come, or for work without an end where there is one rank."""
    if dist.get_world_size() == 1:
        wait_alone()
    if dist.get_rank() == 0:
        pause()
    value = torch.ones(1, device=place())
    dist.all_reduce(value)
    value.item()


def wait_alone() -> None:
    module: Any = torch.get_device_module(KIND)
    if hasattr(module, "_sleep"):
        for _ in range(1000):
            module._sleep(2**30)
        module.synchronize()
    pause()


def pause() -> None:
    """Waits for ever: a signal that asks for stacks ends a pause."""
    while True:
        signal.pause()


def stacks() -> None:
    try:
        launcher(wait_for_all, deadline=15.0, grace_period=2.0)()
    except LaunchTimeout as error:
        print(error)
        check(f"at {Path(__file__).name}:" in str(error), "the report says where ranks were")
        check(len(error.stacks) == count(), "there is a stack of each rank")
    else:
        check(False, "the deadline ends it")
    check(len(launcher(where)()) == count(), "the next call runs")


ALL: dict[str, Callable[[], None]] = {
    "ports": ports,
    "touched": touched,
    "prepared": prepared_ones,
    "memory": memory,
    "queued": queued,
    "stacks": stacks,
}
