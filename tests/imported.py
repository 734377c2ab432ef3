"""Processes that have imported torch before they begin: forks of an interpreter that each process of pytest has.

The second or two that an import takes is spent once, and not by each of hundreds of scripts and fork servers.
``IMPORTED`` stands in for ``sys.executable`` in the command of a test's script: arguments, environment, directory,
streams, limits, exit status and parent are as before. The fork servers that mlaunch starts are such forks too, and so
are the processes of its ``Server``, in this process and in those scripts (each has one in reserve, for its first),
unless something is asked for that counts as torch is imported. All else starts a fresh interpreter:
``sys.executable``, flags, and what those start.
``tests/forked.py`` is the other side.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlaunch.base import linux
from mlaunch.caller.warm_server import warm_server
from mlaunch.protocol.settings import import_variables
from tests.processes import descendants

IMPORTED = f"{sys.executable}-imported"  # no file: only Popen, where forks are lent, knows what it means
_USUAL = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
_FORK_SERVER = "mlaunch-fork-server"
_SERVER = "serve_until_end_of_input"
_HUGE_HEAP = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")  # of the fork servers
_LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]
_PR_SET_CHILD_SUBREAPER = 36
_END_TIMEOUT = 30.0  # seconds for the interpreter, once it is asked for no more
NAMESPACES = "MLAUNCH_TESTS_NAMESPACES"  # in a script's environment: a process on whose (simulated) host it is to run
libc = ctypes.CDLL(None, use_errno=True)
Asked = dict[str, Any]  # what Popen is asked for
Request = dict[str, Any]  # what a new process has from the one that starts it


class Forks:
    """Asks an interpreter for forks, which become children of this process."""

    def __init__(self, connection: socket.socket, environ: Mapping[str, str]) -> None:
        self._connection = connection
        self._settings = _settings(environ)
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def suit(self, environ: Mapping[str, str]) -> bool:
        return os.getpid() == self._owner and _settings(environ) == self._settings

    def begin(self, request: Request, fds: list[int]) -> int:
        """Returns the pid."""
        pid = b""
        with self._lock, _as_next_parent(), contextlib.suppress(ConnectionError):
            _send(self._connection, request, fds)
            pid = self._connection.recv(16)
        if not pid:
            raise RuntimeError("the interpreter that is forked (tests.forked) has ended; did a test end it?")
        return int(pid)

    def refuse(self) -> None:
        """Does what is to be done before a fresh interpreter is started instead."""


class Reserve(Forks):
    """The one fork that a process already has as its child."""

    def __init__(self, connection: socket.socket, environ: Mapping[str, str], pid: int) -> None:
        super().__init__(connection, environ)
        self._pid = pid
        os.register_at_fork(before=self.refuse)  # a fork of this process is its fork server, if it has one

    def suit(self, environ: Mapping[str, str]) -> bool:
        return self._connection.fileno() >= 0 and super().suit(environ)

    def begin(self, request: Request, fds: list[int]) -> int:
        with self._connection:
            _send(self._connection, request, fds)
        return self._pid

    def refuse(self) -> None:
        if self._connection.fileno() >= 0 and os.getpid() == self._owner:
            self._connection.close()
            os.waitpid(self._pid, 0)


def lend_forks() -> Iterator[None]:
    """Starts the interpreter, which ends with this process; to be used as a fixture."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = dict(os.environ)
    interpreter = subprocess.Popen(
        [*_USUAL, "-m", "tests.forked", str(theirs.fileno())],
        cwd=Path(__file__).resolve().parent.parent,
        env=before | dict([_HUGE_HEAP]),
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    try:
        with lent(Forks(ours, before)):
            yield
    finally:
        ours.shutdown(socket.SHUT_RDWR)  # also for what a failed test has left: its forks of this process share it
        ours.close()
        _end(interpreter)


def _end(interpreter: subprocess.Popen[bytes]) -> None:
    """Ends it, and what tests have left, by which the session could not end."""
    try:
        interpreter.wait(_END_TIMEOUT)
    except subprocess.TimeoutExpired:
        interpreter.kill()
        interpreter.wait()
    warm_server.close()
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def lent(forks: Forks) -> Iterator[None]:
    """Has this process's ``subprocess.Popen`` take a fork where one will do."""
    original = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    signature = inspect.signature(original)

    def execute_child(self: subprocess.Popen[bytes], *args: Any) -> None:
        asked = signature.bind(self, *args).arguments
        if not _fork_instead(self, forks, asked):
            original(**asked)

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = original  # type: ignore[attr-defined]


def _fork_instead(process: subprocess.Popen[bytes], forks: Forks, asked: Asked) -> bool:
    """Returns False if this takes a fresh interpreter."""
    command = asked["args"]
    is_server = is_server_of_mlaunch(command)
    if command[0] != IMPORTED and not is_server:
        return False
    usual = _USUAL if _FORK_SERVER in command else _USUAL[:1]  # a ``Server`` gets no flags
    if is_server and command[: len(usual)] == usual:
        asked["args"] = [IMPORTED, *command[len(usual) :]]
    request = _request(asked)
    if request is None or asked["args"][0] != IMPORTED or not forks.suit(request["environ"]):
        if NAMESPACES in (asked["env"] or ()):
            raise ValueError(f"no fork can be had for this, and only forks go to a host by {NAMESPACES}: {command}")
        forks.refuse()
        asked["args"] = [sys.executable, *command[1:]] if command[0] == IMPORTED else command
        asked["executable"] = asked["args"][0]
        return False
    streams = zip(range(3), (asked["p2cread"], asked["c2pwrite"], asked["errwrite"]), strict=True)
    fds = {number: number if fd == -1 else fd for number, fd in streams} | {fd: fd for fd in asked["pass_fds"]}
    request["fds"] = [number for number, fd in fds.items() if linux.identity(fd) is not None]
    process.pid = forks.begin(request, [fds[number] for number in request["fds"]])
    process._child_created = True  # type: ignore[attr-defined]
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]
    return True


def is_server_of_mlaunch(command: Sequence[Any]) -> bool:
    """True if it starts a fork server, or the process of a ``Server``."""
    return _FORK_SERVER in command or any(_SERVER in str(part) for part in command)


def _request(asked: Asked) -> Request | None:
    """None for what no fork can have."""
    environ = dict(os.environ if asked["env"] is None else asked["env"])
    if environ.get("GLIBC_TUNABLES", _HUGE_HEAP[1]) != _HUGE_HEAP[1] or asked["preexec_fn"]:
        return None
    try:
        cwd = os.path.abspath(os.fspath(asked["cwd"] or "."))
    except FileNotFoundError:
        return None
    return {
        "argv": [os.fsdecode(part) for part in asked["args"][1:]],
        "environ": {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()},
        "cwd": cwd,
        "session": asked["start_new_session"],
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "ignored": [int(number) for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN],
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS},
        "cores": sorted(os.sched_getaffinity(0)),
    }


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    """What a process has read of its environment once torch is imported, but for the paths, which it is told."""
    return {name: value for name, value in import_variables(environ).items() if name != "PYTHONPATH"}


@contextlib.contextmanager
def _as_next_parent() -> Iterator[None]:
    """Has this process become the parent of what a child of its child forks."""
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _send(connection: socket.socket, request: Request, fds: list[int]) -> None:
    with open(os.memfd_create("request"), "wb") as memfd:
        memfd.write(json.dumps(request).encode())
        memfd.flush()
        socket.send_fds(connection, [b"."], [memfd.fileno(), *fds])
