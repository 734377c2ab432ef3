"""Members started by a program that joins their standard streams.

The program runs ``python -m mlaunch.engines.member.started_together``.

``mpirun`` gives its standard input only to its first process, and mixes the output of all. So each process prints one
line, with the address at which it listens and a secret, and nothing more. The caller sends the addresses of all to the
first process, which connects to the others and carries the records between them and the caller. Each process then is a
member, over its connection.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NoReturn

from mlaunch.base import linux
from mlaunch.engines.member import main as program
from mlaunch.engines.member import member
from mlaunch.engines.wire import command_of, patience_of
from mlaunch.engines.wire.first_process import (
    MARK,
    CarriersStream,
    Lead,
    Mux,
    ProcessAddress,
    limit_reads,
    without_delay,
)
from mlaunch.engines.wire.frame_stream import FrameStream
from mlaunch.rendezvous.address import LOOPBACK, addresses

_STRANGER_TIMEOUT = 30  # seconds in which a process that connects must prove that it knows the secret
_STRANGERS = 64  # connections at a time that have not proved it: each has a thread
_BACKLOG = 4096  # connections that wait to be accepted; the system applies its own limit
_CHECK_DELAY = 1.0  # seconds between checks that this process's parent is still there
_READ = 65536
# Variables by which programs give a process its number, and the number of processes.
_NUMBERS = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("PMIX_RANK", "PMIX_SIZE"),
            ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))  # fmt: skip


def main() -> NoReturn:
    """Serve until the caller or the first process ends."""
    incoming, outgoing = linux.above_standard(os.dup(0)), linux.above_standard(os.dup(1))
    # Standard output carries frames; anything else that is printed goes to standard error.
    os.dup2(2, 1)
    member.ignore(member.FOR_RANKS)
    secret, starter = secrets.token_hex(32), os.getppid()
    with socket.create_server(("0.0.0.0", 0), backlog=_BACKLOG) as listener:
        where = _print_address(outgoing, listener.getsockname()[1], secret)
        stream: CarriersStream = FrameStream(incoming, outgoing)
        lead = _hear(stream, where)
        if lead is None:
            _follow(listener, secret, starter)
    _lead(stream, lead, where)
    os._exit(0)


def _print_address(outgoing: int, port: int, secret: str) -> ProcessAddress:
    number, size = next(((os.environ[a], os.environ[b]) for a, b in _NUMBERS if {a, b} <= os.environ.keys()), (-1, 0))
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"  # clones and containers share names and pids
    where = ProcessAddress(name, tuple(addresses()) or (LOOPBACK,), port, int(number), int(size), secret)
    os.write(outgoing, b"\n" + MARK + json.dumps(vars(where)).encode() + b"\n")
    return where


def _hear(stream: CarriersStream, where: ProcessAddress) -> Lead | None:
    """Wait for the caller's ``Lead``; None if it is meant for another process, or only others receive it."""
    patience = patience_of(sys.argv)
    with contextlib.suppress(EOFError):
        while True:
            if not select.select([stream], [], [], patience)[0]:
                print(f"mlaunch: nothing has come from the caller for {patience:g} s", file=sys.stderr, flush=True)
                os._exit(1)
            for record, _ in stream.receive(1):  # what follows it is for the ``Mux``
                if isinstance(record, Lead) and record.name == where.name:
                    return record
                # A program that copies its input to all processes blocks if one of them does not read.
                threading.Thread(target=_drain, args=(stream.incoming,), daemon=True).start()
                return None
    if where.number == 0:  # the first process would have received it: the caller is gone
        os._exit(1)
    return None


def _drain(incoming: int) -> None:
    """Read and drop the input that a program copies to all of its processes, and that is not for this one."""
    os.set_blocking(incoming, True)
    while os.read(incoming, _READ):
        pass


class _Strangers:
    """Connections that have not proved yet that they know the secret. Above ``_STRANGERS``, the oldest is closed.

    So strangers neither block a connection that has the secret, nor take more than that many threads. ``found``:
    receives each connection that has the secret.
    """

    def __init__(self, secret: bytes, found: queue.SimpleQueue[Connection]) -> None:
        self._secret = secret
        self._found = found
        self._lock = threading.Lock()
        self._ends: deque[socket.socket] = deque()

    def admit_all(self, listener: socket.socket) -> None:
        while True:
            end, _ = listener.accept()
            with self._lock:
                self._ends.append(end)
                # The oldest is closed, since the newest may be the one that has the secret.
                first = self._ends.popleft() if len(self._ends) > _STRANGERS else None
            if first is not None:
                with contextlib.suppress(OSError):  # it is gone already
                    first.shutdown(socket.SHUT_RDWR)  # its thread then leaves, and closes it
            threading.Thread(target=self._admit, args=(end,), daemon=True).start()

    def _admit(self, end: socket.socket) -> None:
        """Pass on a connection that proves the secret, unless it was closed meanwhile to make room."""
        with end:
            limit_reads(end.fileno(), _STRANGER_TIMEOUT)
            connection = Connection(os.dup(end.fileno()))
            known = _knows(connection, self._secret)
            with self._lock, contextlib.suppress(ValueError):
                self._ends.remove(end)
                if known:
                    limit_reads(end.fileno(), 0)
                    self._found.put(connection)
                    return
        connection.close()


def _knows(connection: Connection, secret: bytes) -> bool:
    try:
        deliver_challenge(connection, secret)
        answer_challenge(connection, secret)
    except (AuthenticationError, OSError, EOFError):
        return False
    return True


def _follow(listener: socket.socket, secret: str, starter: int) -> NoReturn:
    """Serve as a member over a connection from the first process, which connects once the last process has started."""
    found: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    threading.Thread(target=_Strangers(secret.encode(), found).admit_all, args=(listener,), daemon=True).start()
    connection = None
    while connection is None:
        with contextlib.suppress(queue.Empty):
            connection = found.get(timeout=_CHECK_DELAY)
        if connection is None and os.getppid() != starter:  # the parent is gone, and nobody will connect
            os._exit(1)
    with without_delay(os.dup(connection.fileno())) as end:
        for standard in (0, 1):
            os.dup2(end.fileno(), standard)
    connection.close()
    program.watch(0)
    member.main(secret)


def _lead(stream: CarriersStream, lead: Lead, own: ProcessAddress) -> None:
    """Carry the streams of all machines, and serve as this machine's member."""
    ends = {}
    for place, where in lead.all.items():
        try:
            ends[place] = _start_member() if where.name == own.name else where.connect()
        except OSError as error:
            print(f"mlaunch: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    member.ignore({signal.SIGTERM})  # mpirun sends it to all before it ends: last records are still to be carried
    Mux(stream, ends).run()


def _start_member() -> socket.socket:
    ours, theirs = socket.socketpair()
    with theirs:
        subprocess.Popen(
            command_of(sys.executable, patience_of(sys.argv)), stdin=theirs.fileno(), stdout=theirs.fileno()
        )
    return ours


if __name__ == "__main__":
    main()
