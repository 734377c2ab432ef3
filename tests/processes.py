"""Reading the process table, and waiting for what happens there."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path


def status_of(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat behind the name, the kernel's letter first."""
    # The name in parentheses may hold anything, so what counts comes after the last one.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def alive(pid: int) -> bool:
    """False for a zombie, too: where PID 1 does not reap, a dead orphan stays one."""
    try:
        return status_of(pid)[0] not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return False


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (task / "children").read_text().split())
    return found


apart: set[int] = set()  # children of this process that outlive a test on purpose, with their families


def agents(server: int) -> list[int]:
    """The children of a fork server that are agents: it may be trying an import in another one."""
    return [pid for pid in children(server) if name_of(pid).startswith("mlaunch: agent")]


def name_of(pid: int) -> str:
    """Returns what a process calls itself; "" once it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text()
    return ""


def ours() -> list[int]:
    """The descendants of this process that no test may leave behind."""
    spared = {pid for root in apart for pid in (root, *descendants(root))}
    return [pid for pid in descendants(os.getpid()) if pid not in spared]


def descendants(pid: int) -> list[int]:
    found = children(pid)
    for child in list(found):
        found += descendants(child)
    return found


def wait_gone(pids: list[int], deadline: float = 30.0) -> None:
    """Waits until none of the processes runs any more."""
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ready, _, _ = select.select([pidfd], [], [], deadline)
        finally:
            os.close(pidfd)
        assert ready, f"process {pid} still runs after {deadline} s"


def said_in_fork(say: Callable[[], str]) -> str:
    """What it returns in a fork of this process; "" if it raises there, which stderr shows."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, say().encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


def listen() -> socket.socket:
    """Return a socket that listens on loopback, at a port of its own."""
    return socket.create_server(("127.0.0.1", 0))


def soon(so: Callable[[], bool], seconds: float = 30.0, every: float = 0.01) -> bool:
    """True once it is so; False if it is not in that time, for a test to say what is there instead.

    ``every``: seconds between two looks, for those that are expensive, such as a command.
    """
    end = time.monotonic() + seconds
    while not (found := so()) and time.monotonic() < end:
        signal.sigtimedwait([], every)
    return found


def wait_until(so: Callable[[], bool]) -> None:
    end = time.monotonic() + 120.0
    while not so():
        assert time.monotonic() < end
        signal.sigtimedwait([], 0.01)
