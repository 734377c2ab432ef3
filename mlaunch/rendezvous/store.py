"""The launch's own store, in a process beside its agent.

torch's TCPStore runs in a forked process of its own, on a socket that was bound and listening before anyone was told
of it: no port is found and then lost, and no client dials too early and waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from mlaunch.base import linux
from mlaunch.rendezvous import names
from mlaunch.rendezvous.tcp_store import serve


@dataclass(frozen=True)
class GateConfig:
    """What the gate needs: a public socket, which launch it serves, and what it asks of other machines."""

    listener: socket.socket
    launch_id: str
    token: str | None
    heartbeat_timeout: float

    def serve(self, store: int) -> None:
        """Serves the launch's other machines for as long as the process lives. ``store``: its port on loopback."""
        import asyncio

        from mlaunch.rendezvous.gate import Gate

        asyncio.run(Gate(store, self.launch_id, self.token, self.heartbeat_timeout).serve(self.listener))


class StoreProcess:
    """A store in a forked process that ends with this one. The caller closes its ``listener`` afterwards.

    ``gate``: what other machines may reach of it, in the same process; None: nothing.
    """

    def __init__(
        self, listener: socket.socket, *, gate: GateConfig | None = None, close_in_child: Iterable[int] = ()
    ) -> None:
        self.address, self.port = listener.getsockname()[:2]
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _run(listener, gate, parent, close_in_child)
        self.sentinel = os.pidfd_open(self.pid)

    def kill(self) -> None:
        """Ends the process, which holds nothing that outlives the launch. It remains to be reaped."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Waits for the process's end and returns its exit code."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.sentinel)
        return os.waitstatus_to_exitcode(status)


def _run(listener: socket.socket, gate: GateConfig | None, parent: int, close: Iterable[int]) -> None:
    try:
        linux.die_with(parent)
        for fd in close:
            os.close(fd)
        port = listener.getsockname()[1]
        names.look_up_in_files_only()  # this process knows nobody but by address
        store = serve(listener)
        if gate is not None:
            gate.serve(port)
        while store is not None:
            signal.pause()
    finally:
        os._exit(1)
