"""The work that every contestant does, importable by those that spawn."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist


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


def serve_floor() -> None:
    """Reads sizes, answers with seconds; a process of its own, so that it forks what a clean process would."""
    from benchmarks.measure import seconds

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for line in sys.stdin:
        size = int(line)
        print(seconds(lambda: floor_once(size)), flush=True)  # noqa: B023 - called before the loop goes on


def wait_for_ever() -> None:
    """A rank in a collective that does not come."""
    dist.barrier()
    if dist.get_rank() == 0:
        signal.pause()
    dist.barrier()


if __name__ == "__main__":
    serve_floor()
