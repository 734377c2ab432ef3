"""The key-value store at which the ranks of a launch meet.

``HostedServer`` hosts it in a forked process of its own, on a socket that was bound and listening before anyone was
told of it: no port is found and then lost, and no client dials too early and waits. ``Meeting`` is one rank's view of
it, under the launch's own name, so that nothing of one launch is seen by another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from mlaunch.base import linux


@dataclass(frozen=True)
class Front:
    """What other machines may reach of a launch: the gate, on a public socket."""

    listener: socket.socket
    launch_id: str
    token: str | None
    heartbeat_timeout: float

    def serve(self, store: int) -> None:
        import asyncio

        from mlaunch.rendezvous.gate import Gate

        asyncio.run(Gate(store, self.launch_id, self.token, self.heartbeat_timeout).serve(self.listener))


class HostedServer:
    """A store in a forked process that ends with this one. The caller closes its ``listener`` afterwards."""

    def __init__(
        self, listener: socket.socket, *, front: Front | None = None, close_in_child: Iterable[int] = ()
    ) -> None:
        self.address, self.port = listener.getsockname()[:2]
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _host(listener, front, parent, close_in_child)
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


def _host(listener: socket.socket, front: Front | None, parent: int, close: Iterable[int]) -> None:
    try:
        linux.die_with(parent)
        for fd in close:
            os.close(fd)
        port = listener.getsockname()[1]
        linux.look_names_up_in_files_only()  # this process knows nobody but by address
        store = serve(listener)
        if front is not None:
            front.serve(port)
        while store is not None:
            signal.pause()
    finally:
        os._exit(1)


def serve(listener: socket.socket) -> dist.TCPStore:
    """Serves a store on ``listener`` for as long as the process lives and holds the result.

    This process must never fork: a fork beside the store's thread can leave the resolver's lock taken for ever in the
    child.
    """
    address, port = listener.getsockname()[:2]
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class Meeting:
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
