"""A rendezvous server in a process of its own, for processes that do not belong to one launch.

``Server()`` starts one; ``python -m mlaunch.compat.caller.server --port 29500`` runs one in the foreground.
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
from mlaunch.compat import wire
from mlaunch.rendezvous.address import LOOPBACK, listen

_KILLED_TIMEOUT = 5.0  # seconds
_BOOTSTRAP = (
    "import sys; fd, sys.path[:] = int(sys.argv[2]), sys.argv[3:]; "
    "from mlaunch.compat.caller.server import serve_until_end_of_input; serve_until_end_of_input(fd)"
)


class Server:
    """A server that lives as long as this process, or until ``close()``. Also a context manager.

    It listens when the constructor returns; its process serves clients as soon as it has imported torch. Clients in
    this process, and in processes that it starts from now on, find the server's secret in the environment
    (``MLAUNCH_SECRET_<port>``); pass it to others.

    Args:
        port: The port to listen on; 0: the system chooses one.
        address: The address to listen on; the default can be reached only from this machine.

    Attributes:
        py_server_port: The port on which it listens.
        secret: Signs the clients' values. Each server has a new one, which its process does not know.

    Raises:
        OSError: The port is taken, or the address is not this machine's.
    """

    def __init__(self, port: int = 0, *, address: str = LOOPBACK) -> None:
        with listen(address, port) as listener:
            self.address, self.py_server_port = listener.getsockname()[:2]
            fd = listener.fileno()
            # A process of its own: one that hosts the store's thread must never fork, which a user's process may do.
            with not_followed():
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOTSTRAP, "--fd", str(fd), *sys.path],
                    stdin=subprocess.PIPE,  # its end tells the server that this process is gone
                    pass_fds=[fd],
                    # Ctrl-C in a terminal goes to the whole foreground group; it must not end the server.
                    start_new_session=True,
                )
        self.secret = wire.draw_secret()
        name = wire.secret_variable(self.py_server_port)
        os.environ[name] = self.secret
        # Unlike __del__, this runs at the interpreter's end before modules are gone.
        self._close = weakref.finalize(self, _end, self._process, name)

    def close(self) -> None:
        """End the server; its clients lose their connection."""
        self._close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_until_end_of_input(fd: int) -> None:
    """Serve until stdin ends, in a server's process."""
    from mlaunch.rendezvous.tcp_store import serve

    store = serve(socket.socket(fileno=fd))
    while store is not None and sys.stdin.buffer.read(1):
        pass


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mlaunch.compat.caller.server",
        description="Serves mlaunch.Client until it is interrupted.",
    )
    parser.add_argument("--port", type=int, default=0, help="default: the system chooses one, and it is printed")
    parser.add_argument("--address", default=LOOPBACK, help="default: %(default)s, only for this machine")
    args = parser.parse_args(argv)
    from mlaunch.rendezvous.tcp_store import serve

    listener = listen(args.address, args.port)
    address, port = listener.getsockname()[:2]
    print(f"serving at {address}, port {port}", flush=True)
    if wire.known_secret(port) is None:
        print(f"clients need {wire.secret_variable(port)}={wire.draw_secret()} in their environment", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        store = serve(listener)
        while store is not None:
            signal.pause()


def _end(process: subprocess.Popen[bytes], variable: str) -> None:
    os.environ.pop(variable, None)
    if process.stdin is not None:
        process.stdin.close()
    # Not SIGTERM: the store's thread may delay an orderly end, and there is nothing to save.
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it is inside the kernel, and ends when it returns
        process.wait(_KILLED_TIMEOUT)


if __name__ == "__main__":
    main()
