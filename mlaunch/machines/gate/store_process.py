"""The process with the gate and the store of a launch over several machines.

Its socket listens before any client learns its address. So no other process can take the port in between, and no
client connects too early and has to wait.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterable
from dataclasses import field

from mlaunch.base import linux
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.own_process import allow_files, name_process


@frozen_record
class GateConfig:
    """The gate's configuration: its public socket, the launch that it serves, and what it requires of machines."""

    listener: socket.socket
    launch_id: str
    token: str | None = field(repr=False)
    heartbeat_timeout: float
    store_limit: int | None = None  # bytes

    def serve(self) -> None:
        """Serve the launch's machines for as long as the process lives."""
        from mlaunch.machines.gate.gate import Gate
        from mlaunch.rendezvous import event_loop

        gate = Gate(self.launch_id, self.token, self.heartbeat_timeout, self.store_limit)
        event_loop.run(gate.serve(self.listener))


class StoreProcess:
    """The gate of a launch over several machines, with its store, in a forked process that ends with this one."""

    def __init__(self, gate: GateConfig, close_in_child: Iterable[int] = ()) -> None:
        parent = os.getpid()
        # A separate process, because machines join before the agent forks its ranks: if a process that runs a store's
        # thread forks, its children may wait for the resolver's lock for ever.
        self.pid = os.fork()
        if self.pid == 0:
            _run(gate, parent, close_in_child)
        self.sentinel = os.pidfd_open(self.pid)

    def kill(self) -> None:
        """Kill the process, which holds nothing that outlives the launch. Call ``reap`` after that."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.sentinel)
        return os.waitstatus_to_exitcode(status)


def _run(gate: GateConfig, parent: int, close: Iterable[int]) -> None:
    try:
        # First of all, so that the port does not stay taken if the agent dies.
        linux.die_with(parent)
        name_process("gate", gate.launch_id)
        for fd in close:
            os.close(fd)
        # Each machine has two connections here, and the soft limit is 1024 on most systems.
        allow_files()
        gate.serve()
    finally:
        os._exit(1)
