"""A rendezvous server in a process of its own, for processes that no launch has brought together.

``Server()`` starts one from anywhere; ``python -m mlaunch.compat.caller.server --port 29500`` is one in the foreground.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence

from mlaunch.base.unfollowed import not_followed
from mlaunch.rendezvous import secret
from mlaunch.rendezvous.address import LOOPBACK, listen

_KILLED_TIMEOUT = 5.0  # seconds
_BOOTSTRAP = (
    "import sys; fd, sys.path[:] = int(sys.argv[2]), sys.argv[3:]; "
    "from mlaunch.compat.caller.server import serve_until_end_of_input; serve_until_end_of_input(fd)"
)


class Server:
    """A server that lives as long as this process, or until ``close()``. Also a context manager.

    It listens before this returns; clients that come while its process is still importing torch are served then.
    Clients in this process and in those that it starts from now on find the server's secret in the environment
    (``MLAUNCH_SECRET_<port>``); others are given it.

    Args:
        port: Where to listen; 0: chosen by the system.
        address: On which address; the default is reached from this machine alone.

    Attributes:
        py_server_port: The port on which it listens.
        secret: Signs the clients' values. It is drawn for each server, and the server itself does not know it.

    Raises:
        OSError: The port is taken, or the address is not this machine's.
    """

    def __init__(self, port: int = 0, *, address: str = LOOPBACK) -> None:
        with listen(address, port) as listener:
            self.address, self.py_server_port = listener.getsockname()[:2]
            fd = listener.fileno()
            # A process of its own: one that hosts the store's thread must never fork, and a user's process may.
            with not_followed():
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOTSTRAP, "--fd", str(fd), *sys.path],
                    stdin=subprocess.PIPE,  # its end tells the server that we are gone
                    pass_fds=[fd],
                    # Ctrl-C in a terminal goes to the whole foreground group; when the server ends is its owner's
                    # decision.
                    start_new_session=True,
                )
        self.secret = secret.draw()
        name = secret.variable(self.py_server_port)
        os.environ[name] = self.secret
        # Runs at the interpreter's end, too, and before modules are gone, unlike __del__.
        self._close = weakref.finalize(self, _end, self._process, name)

    def close(self) -> None:
        """Ends the server; its clients lose their connection."""
        self._close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_until_end_of_input(fd: int) -> None:
    """Lives the life of a server's process."""
    from mlaunch.rendezvous.tcp_store import serve

    store = serve(socket.socket(fileno=fd))
    while store is not None and sys.stdin.buffer.read(1):
        pass


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mlaunch.compat.caller.server",
        description="Serves mlaunch.Client until it is interrupted.",
    )
    parser.add_argument("--port", type=int, default=0, help="default: chosen by the system, and printed")
    parser.add_argument("--address", default=LOOPBACK, help="default: %(default)s, for this machine alone")
    args = parser.parse_args(argv)
    from mlaunch.rendezvous.tcp_store import serve

    listener = listen(args.address, args.port)
    address, port = listener.getsockname()[:2]
    print(f"serving at {address}, port {port}", flush=True)
    if secret.known(port) is None:
        print(f"clients need {secret.variable(port)}={secret.draw()} in their environment", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        store = serve(listener)
        while store is not None:
            signal.pause()


def _end(process: subprocess.Popen[bytes], variable: str) -> None:
    os.environ.pop(variable, None)
    if process.stdin is not None:
        process.stdin.close()
    # At once: the store's thread may hold up an end in good order, and nothing of it is worth keeping.
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it sits in the kernel, and ends once that is done with it
        process.wait(_KILLED_TIMEOUT)


if __name__ == "__main__":
    main()
