"""The work that every contestant does, importable by those that spawn."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

WAIT = 0.25  # seconds


def wait(number: int) -> int:
    """A trial of a sweep."""
    signal.sigtimedwait([], WAIT)
    return number


def reduce_once() -> float:
    """Inside an initialised group."""
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


def join_and_reduce(rank: int, size: int, port: int, queue: Any) -> None:
    """For launchers that leave the group to their users."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    queue.put((rank, reduce_once()))
    dist.destroy_process_group()


def join_by_environment() -> float:
    dist.init_process_group("gloo")
    value = reduce_once()
    dist.destroy_process_group()
    return value


def raise_on(culprit: int) -> None:
    """Raises on one rank, for which the others wait."""
    if dist.get_rank() == culprit:
        raise ValueError("the culprit's")
    signal.pause()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def floor_once(size: int) -> None:
    """As little as can be: fork, join, reduce, exit; rank 0 hosts the store."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            _floor_rank(rank, size, listener)
        pids.append(pid)
    listener.close()
    for pid in pids:
        _, status = os.waitpid(pid, 0)
        if status != 0:
            raise RuntimeError(f"a process of the floor ended with status {status}")


def _floor_rank(rank: int, size: int, listener: socket.socket) -> None:
    try:
        torch.set_num_threads(1)
        port = listener.getsockname()[1]
        if rank == 0:
            store = dist.TCPStore(
                "127.0.0.1", port, size, True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        else:
            store = dist.TCPStore("127.0.0.1", port, size, False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        reduce_once()
        dist.barrier()
    except BaseException:
        os._exit(1)
    os._exit(0)


def make_gib() -> torch.Tensor:
    return torch.ones(2**30 // 4)


def copy_once(size: int) -> float:
    """``size`` processes copy a GiB each into fresh memory, one thread each: the seconds of the slowest."""
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(size), context.SimpleQueue()
    processes = [context.Process(target=_copy, args=(barrier, queue)) for _ in range(size)]
    for process in processes:
        process.start()
    slowest = max(queue.get() for _ in processes)
    for process in processes:
        process.join()
    return float(slowest)


def _copy(barrier: Any, queue: Any) -> None:
    torch.set_num_threads(1)
    tensor = make_gib()
    tensor.clone()  # a virtual machine may have to ask its host for memory that it has not used lately
    barrier.wait()
    start = time.perf_counter()
    tensor.clone()  # and freed: what a launch passes is gone, too, when it returns
    queue.put(time.perf_counter() - start)


def serve_floor() -> None:
    """Reads lines of a name and a size, answers with seconds.

    A process of its own, so that it forks what an ordinary, clean process would.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for line in sys.stdin:
        name, size = line.split()
        start = time.perf_counter()
        if name == "copy":
            print(copy_once(int(size)), flush=True)
        else:
            floor_once(int(size))
            print(time.perf_counter() - start, flush=True)


@contextlib.contextmanager
def floor() -> Iterator[Callable[[str, int], float]]:
    """A function that has ``serve_floor`` measure in its own process."""
    command = [sys.executable, "-m", "benchmarks.work"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8") as process:
        stdin, stdout = process.stdin, process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the floor's process has no pipes")

        def measure(name: str, size: int) -> float:
            stdin.write(f"{name} {size}\n")
            stdin.flush()
            return float(stdout.readline())

        yield measure
        stdin.close()


if __name__ == "__main__":
    serve_floor()
