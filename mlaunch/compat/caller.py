"""For processes that are not ranks: detectron2's ``launch``, and a rendezvous server for MegEngine's clients.

``Server()`` starts one, in a process of its own, for processes that do not belong to one launch; ``python -m
mlaunch.compat.caller --port 29500`` runs one in the foreground.
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
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from mlaunch.base.own_process import not_followed
from mlaunch.compat import wire
from mlaunch.rendezvous.address import LOOPBACK, listen

R = TypeVar("R")
_HALF_AN_HOUR = timedelta(minutes=30)
_KILLED_TIMEOUT = 5.0  # seconds
_BOOTSTRAP = (
    "import sys; fd, sys.path[:] = int(sys.argv[2]), sys.argv[3:]; "
    "from mlaunch.compat.caller import serve_until_end_of_input; serve_until_end_of_input(fd)"
)


def launch(
    main_func: Callable[..., R],
    num_gpus_per_machine: int,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str | None = None,
    args: Sequence[Any] = (),
    timeout: float | timedelta | None = _HALF_AN_HOUR,
    *,
    backend: str | None = None,
) -> list[R]:
    """Run ``main_func(*args)`` once per device; call it on every machine.

    In a world of one the function runs in this process, without a process group. Otherwise each rank is a process, with
    its device, its process group and ``mlaunch.comm``'s local group ready.

    Args:
        main_func: The function.
        num_gpus_per_machine: Ranks on each machine; without accelerators they are processes on its CPUs.
        num_machines: The number of machines.
        machine_rank: This machine's number, from 0.
        dist_url: "tcp://host:port" of machine 0. None or "auto": one machine, and the system chooses a port. On one
            machine, "file://..." does the same: no file is needed.
        args: The function's arguments.
        timeout: Limit in seconds (or a timedelta) for each collective; None: no limit.
        backend: The process group's, which some forks of detectron2 pass; None: the device's own. Pass it by name: its
            position differs there.

    Returns:
        The values of this machine's ranks, in the order of ranks. (detectron2 returns None.)

    Raises:
        ValueError: A number that is not allowed, or several machines without a ``dist_url`` that all can reach.
        Exception: As a call of a function under ``@launcher``.
    """
    _check_number("num_gpus_per_machine", num_gpus_per_machine, 1)
    _check_number("num_machines", num_machines, 1)
    _check_number("machine_rank", machine_rank, 0)
    if machine_rank >= num_machines:
        raise ValueError(f"machine_rank={machine_rank}: allowed of {num_machines} machine(s): 0 to {num_machines - 1}")
    host, port = _address(dist_url, num_machines)
    world_size = num_machines * num_gpus_per_machine
    if world_size == 1:
        return [main_func(*args)]
    from mlaunch.caller.launcher import launcher  # late: a server's process has no use for it

    run = launcher(
        main_func,
        n_gpus=num_gpus_per_machine,
        world_size=world_size,
        rank_start=machine_rank * num_gpus_per_machine,
        master_ip=host,
        port=port,
        timeout=timeout,
        backend=backend,
    )
    return run(*args)


def _address(url: str | None, machines: int) -> tuple[str, int]:
    if url is None or url == "auto" or url.startswith("file://"):
        if machines > 1:
            raise ValueError(
                f"dist_url={url!r} with num_machines={machines}: the machines cannot find each other by this; "
                f"give machine 0's address and a free port there: dist_url='tcp://10.0.0.1:29500'"
            )
        return "localhost", 0
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or not port:
        raise ValueError(f"dist_url={url!r}: allowed: 'auto', 'tcp://host:port', 'file://...', or None")
    return parts.hostname, port


def _check_number(name: str, value: object, lowest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise ValueError(f"{name}={value!r}: allowed: whole numbers from {lowest}")


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
        prog="python -m mlaunch.compat.caller",
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
