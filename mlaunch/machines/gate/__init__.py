"""The process with the gate and the store of a launch over several machines, and what gates' and links' share.

Its socket listens before any client learns its address. So no other process can take the port in between, and no
client connects too early and has to wait.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Coroutine, Iterable
from dataclasses import field
from typing import Any, NoReturn

from mlaunch.base import linux
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.own_process import allow_files, name_process

UVLOOP = "MLAUNCH_UVLOOP"  # a variable; "0": asyncio's loop in any case


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

        gate = Gate(self.launch_id, self.token, self.heartbeat_timeout, self.store_limit)
        run_in_loop(gate.serve(self.listener))


class GateProcess:
    """The gate of a launch over several machines, with its store, in a forked process that ends with this one."""

    def __init__(self, gate: GateConfig, close_in_child: Iterable[int] = ()) -> None:
        parent = os.getpid()
        # A separate process, because machines join before the agent forks its ranks: if a process that runs a store's
        # thread forks, its children may wait for the resolver's lock for ever.
        self.pid = os.fork()
        if self.pid == 0:
            _run_gate(gate, parent, close_in_child)
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


def _run_gate(gate: GateConfig, parent: int, close: Iterable[int]) -> NoReturn:
    try:
        prepare_process(parent, close, "gate", gate.launch_id)
        gate.serve()
    finally:
        os._exit(1)


def prepare_process(parent: int, close: Iterable[int], *name: str) -> None:
    """Name a gate's or a link's process, close what it does not need, and make it end with its parent."""
    # First of all, so that a gate's port does not stay taken if the agent dies.
    linux.die_with(parent)
    name_process(*name)
    for fd in close:
        os.close(fd)
    # Each machine has two connections at the gate, and the soft limit is 1024 on most systems.
    allow_files()


def run_in_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run the only coroutine of a gate or a link to its end: in uvloop if it is installed (extra ``scale``)."""
    if os.environ.get(UVLOOP) != "0":
        try:
            # Most of the time that gates and links take is asyncio's, in Python: six turns of the loop for a new
            # connection, a few calls for each byte. uvloop, in C, saves a third for links, and a fifth for the gate.
            import uvloop
        except ImportError:
            pass
        else:
            uvloop.run(main)
            return
    import asyncio

    asyncio.run(main)
