"""The interpreter behind ``tests/imported.py``, and what its forks do before they run a test's script."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import mmap
import os
import resource
import runpy
import signal
import socket
import sys
import weakref
from pathlib import Path
from types import ModuleType

from mlaunch.protocol import late_imports
from tests import ending
from tests.imported import NAMESPACES, Request, Reserve, is_server_of_mlaunch, lent, libc

_MODULES = (
    "torch", "torch.distributed.run", "pytest", "multiprocessing.synchronize", "mlaunch.caller.launcher",
    "mlaunch.run.command", "mlaunch.agent.main", "mlaunch.forkserver.main", "mlaunch.rendezvous.store_client",
)  # fmt: skip
_HIGH = 800  # descriptors from here on are no script's
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000


def _import() -> list[str]:
    """Returns where modules are found, but for this directory and what is named by PYTHONPATH."""
    mine = ["", os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    gc.disable()
    for module in _MODULES:
        with contextlib.suppress(ModuleNotFoundError):  # a feature may have been taken out: test_without_features.py
            __import__(module)
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # of torch's operators, which a fork need not take apart one by one
    gc.collect()
    gc.freeze()
    gc.enable()
    return [path for path in sys.path if path not in mine]


def _serve(connection: socket.socket) -> tuple[Request, list[int]]:
    """Forks for each request; returns in the forks alone."""
    while True:
        request, fds = _receive(connection)
        born, telling = os.pipe()
        told, go = os.pipe()
        middle = os.fork()
        if middle == 0:
            pid = os.fork()
            if pid > 0:
                os.write(telling, str(pid).encode())
                os._exit(0)
            os.close(go)
            os.read(told, 1)  # until the one between is gone, and the parent is whom the script is to have
            for fd in (born, telling, told):
                os.close(fd)
            connection.close()
            return request, fds
        pid = int(os.read(born, 16))
        os.waitpid(middle, 0)
        connection.send(str(pid).encode())
        for fd in (born, telling, told, go, *fds):
            os.close(fd)


def _receive(connection: socket.socket) -> tuple[Request, list[int]]:
    data, fds, _, _ = socket.recv_fds(connection, 1, 64)
    if not data:
        os._exit(0)
    fds = [_lift(fd) for fd in fds]
    with open(fds[0], "rb") as memfd:
        memfd.seek(0)
        return json.load(memfd), fds[1:]


def _lift(fd: int) -> int:
    lifted = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.close(fd)
    return lifted


def _enter_namespaces(request: Request) -> None:
    """Goes to the host of another process, if it is to."""
    pid = request["environ"].pop(NAMESPACES, None)
    if pid is not None:
        pidfd = os.pidfd_open(int(pid))
        if libc.setns(pidfd, _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(pidfd)


def _keep_one(environ: dict[str, str], not_its: list[int]) -> Reserve | tuple[Request, list[int]]:
    """Forks what this process may make its fork server; there, it returns once it is asked for."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid > 0:
        theirs.close()
        return Reserve(socket.socket(fileno=_lift(ours.detach())), environ, pid)
    ours.close()
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    for fd in not_its:
        os.close(fd)
    for number in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    request, fds = _receive(theirs)
    theirs.close()
    libc.prctl(_PR_SET_PDEATHSIG, 0)
    return request, fds


def _forget_imports() -> None:
    """Have notes of what ranks import of one's own, as interpreters have: all forks would share those of this one.

    Else each fork server of later scripts would import what ranks of any earlier test had to.
    """
    late_imports._noted = mmap.mmap(-1, len(late_imports._noted))
    late_imports._standard = mmap.mmap(-1, len(late_imports._standard))


def _surround(request: Request, fds: list[int]) -> None:
    """Gives this process what the one that asked for it gives its children."""
    os.closerange(3, _HIGH)
    for number, fd in zip(request["fds"], fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    for number in {0, 1, 2}.difference(request["fds"]):
        os.close(number)
    if request["session"] and os.getsid(0) != os.getpid():
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    for name, values in request["limits"].items():
        resource.setrlimit(getattr(resource, name), values)
    os.sched_setaffinity(0, request["cores"])
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


def _open_streams() -> None:
    """Opens them as an interpreter does as it begins."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            errors = "backslashreplace" if number == 2 else "strict"
            stream = open(number, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        except OSError:
            stream = None  # it is closed
        if number == 2 and stream is not None:
            stream.reconfigure(line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(argv: list[str], paths: list[str], environ: dict[str, str]) -> None:
    """Runs a script, a module or code, as an interpreter with these arguments does."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    sys.path[:] = [*filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), *paths]
    sys.orig_argv = [sys.executable, *argv]
    if argv[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = argv[1:]
        runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]
        return
    if argv[0] == "-c":
        sys.argv, text, file = ["-c", *argv[2:]], argv[1], "<string>"
        sys.path.insert(0, "")
    else:
        sys.argv, text, file = argv, Path(argv[0]).read_text(), os.path.abspath(argv[0])
        sys.path.insert(0, str(Path(file).parent))
        main.__file__ = file
    exec(compile(text, file, "exec"), main.__dict__)


def _main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    paths = _import()
    request, fds = _serve(connection)
    _enter_namespaces(request)
    kept = None if is_server_of_mlaunch(request["argv"]) else _keep_one(request["environ"], fds)
    if isinstance(kept, tuple):
        (request, fds), kept = kept, None
    _forget_imports()
    _surround(request, fds)
    _open_streams()
    with ending.noted(), contextlib.nullcontext() if kept is None else lent(kept):
        _run(request["argv"], paths, request["environ"])


if __name__ == "__main__":
    _main()
