"""Processes that have imported torch before they begin: forks of one interpreter, asked for by ``imported_client.py``.

For tests of what comes after a script's imports, in scripts that import torch themselves: the second or two that each
import takes is spent once. ``IMPORTED`` stands in for ``sys.executable`` in their commands, which are as before in all
else: arguments, environment, directory, streams, exit status.
"""

from __future__ import annotations

import array
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

_MODULES = ("torch", "torch.distributed.run")
_NAME = f"mlaunch-tests-{os.getpid()}"  # an abstract address, for this process of pytest alone
_HERE = Path(__file__).resolve()
IMPORTED = [sys.executable, "-S", str(_HERE.parent / "imported_client.py"), _NAME]


def serve_while_used() -> Iterator[None]:
    """Starts the interpreter behind ``IMPORTED``, which ends with its standard input."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.imported", _NAME],
        cwd=_HERE.parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.read() == b"listening"
        yield
        process.stdin.close()


def _serve(listener: socket.socket) -> dict[str, list[str]]:
    """Returns in the forks alone, with what each is to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps those that wait for a script
    while True:
        if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return _fork_script(connection)
        connection.close()


def _fork_script(connection: socket.socket) -> dict[str, list[str]]:
    """Returns in the script's process; the other waits for it, and tells the client how it ended."""
    size = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
    data, fds, _, _ = socket.recv_fds(connection, 1, 3)
    request = json.loads(data + connection.recv(size - 1, socket.MSG_WAITALL))
    pid = os.fork()
    if pid > 0:
        for fd in (0, 1, 2, *fds):
            os.close(fd)
        connection.send(array.array("i", [os.waitpid(pid, 0)[1]]))
        os._exit(0)
    connection.close()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    return request  # type: ignore[no-any-return]


def _become(argv: list[str], environ: dict[str, str], cwd: str) -> None:
    """Runs a script, a module or code, as an interpreter with these arguments does."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:0] = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    if argv[0] == "-c":
        sys.argv, text, file = ["-c", *argv[2:]], argv[1], "<string>"
    else:
        sys.argv, text, file = argv, Path(argv[0]).read_text(), argv[0]
        main.__file__ = file
    sys.path.insert(0, str(Path(file).parent) if argv[0] != "-c" else "")
    exec(compile(text, file, "exec"), main.__dict__)


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{sys.argv[1]}")
        listener.listen()
        os.write(1, b"listening")
        os.dup2(2, 1)  # which the reader sees as the end
        for module in _MODULES:
            __import__(module)
        request = _serve(listener)
    _become(**request)  # type: ignore[arg-type]
