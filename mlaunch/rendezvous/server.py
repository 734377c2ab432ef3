"""The key-value store at which the ranks of a launch meet.

``Server`` hosts it in a process of its own, on a socket that was bound and listening before anyone was told of it:
no port is found and then lost, and no client dials too early and waits. ``Client`` is one rank's view of it, under
the launch's own name, so that nothing of one launch is seen by another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from mlaunch.runtime import linux

LOOPBACK = "127.0.0.1"


def listen(address: str = LOOPBACK, port: int = 0) -> socket.socket:
    """A listening socket; port 0 has the kernel choose."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=4096)


class Server:
    """A store in a forked process that ends with this one. The caller closes its ``listener`` afterwards."""

    def __init__(self, listener: socket.socket, *, close_in_child: Iterable[int] = ()) -> None:
        self.address, self.port = listener.getsockname()[:2]
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _host(listener, parent, close_in_child)
        self.sentinel = os.pidfd_open(self.pid)

    def kill(self) -> None:
        """Ends the server, which holds nothing that outlives the launch. It remains to be reaped."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Waits for the server's end and returns its exit code."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.sentinel)
        return os.waitstatus_to_exitcode(status)


def _host(listener: socket.socket, parent: int, close: Iterable[int]) -> None:
    try:
        linux.die_with(parent)
        for fd in close:
            os.close(fd)
        address, port = listener.getsockname()[:2]
        # The store's thread serves until the process ends; this process never forks, since a fork beside that
        # thread can leave the resolver's lock taken for ever in the child.
        store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        while store is not None:
            signal.pause()
    finally:
        os._exit(1)


class Client:
    """One process's connection to a server. ``namespace`` is the launch's; ``timeout`` is for each operation."""

    def __init__(self, address: str, port: int, namespace: str, timeout: timedelta) -> None:
        connection = dist.TCPStore(address, port, is_master=False, timeout=timeout)
        self.store = dist.PrefixStore(namespace, connection)

    def meet(self, key: str, size: int) -> None:
        """Returns once ``size`` processes have called it with this key. For one use of each key."""
        everyone = f"{key}/everyone"
        if self.store.add(f"{key}/arrived", 1) == size:
            self.store.set(everyone, "")
        self.store.wait([everyone])

    def arrive(self, rank: int) -> None:
        """Leaves a mark for ``missing``."""
        self.store.set(f"arrived/{rank}", "")

    def missing(self, world_size: int) -> list[int]:
        """The ranks that have not arrived."""
        return [rank for rank in range(world_size) if not self.store.check([f"arrived/{rank}"])]
