"""torch's TCPStore: serving one, and connecting to one.

torch serves it with libuv unless it is told otherwise, but the builds of Linux distributions have no libuv: there its
default raises, in servers and clients alike. ``USE_LIBUV=0`` is torch's own word for the other way of serving. The
protocol is the same.
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from types import NoneType
from typing import TYPE_CHECKING, Any

from mlaunch.base import linux

if TYPE_CHECKING:
    import torch.distributed as dist

VARIABLE = "USE_LIBUV"
# Of torchrun: no process hosts the store that torch's env:// and tcp:// are given, whichever that is.
HOSTED_BY_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
_LACKING = 3  # an exit code
_ANSWER_TIMEOUT = 10.0  # seconds for what takes milliseconds

lacks_libuv = False  # as far as this process has looked


def serve(listener: socket.socket) -> dist.TCPStore:
    """Serves a store on ``listener`` for as long as the process lives and holds the result.

    Meanwhile this process must not fork: a fork beside the store's thread can leave the resolver's lock taken for ever
    in the child.
    """
    address, port = listener.getsockname()[:2]
    return _make(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def connect(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Connects to a store. ``timeout``: for that, and for each operation."""
    return _make(address, port, is_master=False, timeout=timeout)


def _make(address: str, port: int, **options: Any) -> dist.TCPStore:
    import torch.distributed as dist

    make: Callable[..., dist.TCPStore] = functools.partial(dist.TCPStore, address, port, **options)
    if os.environ.get(VARIABLE, "1") == "1":
        try:
            return make(use_libuv=True)
        except RuntimeError as error:
            if not _is_refusal(error):
                raise
    return make(use_libuv=False)


def _is_refusal(error: RuntimeError) -> bool:
    """Tells whether torch says that it has no libuv, which it does before it touches the address."""
    return "libuv" in str(error)


def rendezvous(url: str, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Meets at a torch URL, whose own code makes the store; without libuv if torch has none."""
    import torch.distributed as dist

    def meet() -> dist.Store:
        store: dist.Store = next(iter(dist.rendezvous(url, rank, world_size, timeout=timeout)))[0]
        return store

    try:
        return meet()
    except RuntimeError as error:
        if not _is_refusal(error):
            raise
    _do_without()
    return meet()


def host_all_but(address: str, port: int) -> None:
    """Make torch's own rendezvous connect to the store at this address, and host in rank 0 at any other.

    For functions, which may use another port besides: torchrun's variable would leave that without a store. It is set
    where this torch makes its stores in another way.
    """
    torchs: Any = importlib.import_module("torch.distributed.rendezvous")
    host = getattr(torchs, "_create_c10d_store", None)
    if host is None:
        os.environ[HOSTED_BY_AGENT] = "True"
        return
    known = {(address, port), ("localhost", port)}

    def create(hostname: str, at: int, rank: int, world_size: int, timeout: timedelta, *args: Any) -> dist.Store:
        found: dist.Store
        if (hostname, at) in known:
            found = torchs.TCPStore(hostname, at, world_size, is_master=False, timeout=timeout)
        else:
            found = host(hostname, at, rank, world_size, timeout, *args)
        return found

    torchs._create_c10d_store = create


def ask_for_libuv() -> int:
    """Begins to find out whether this torch has libuv, in a fork, whose pid it returns.

    There, since libuv would leave descriptors in this process; and since it takes some milliseconds.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            linux.die_with(parent)
            # With torchrun's variables, a server that cannot listen becomes a client, which waits for a server.
            os.environ.clear()
            code = _LACKING if _refuses() else 0
        finally:
            os._exit(code)
    return pid


def hear_of_libuv(pid: int) -> None:
    """Wait for the answer, and have torch do without libuv if it has none. Without an answer, it has."""
    global lacks_libuv  # noqa: PLW0603 - a fact about this process and its forks
    lacks_libuv = os.waitstatus_to_exitcode(linux.status_within(pid, _ANSWER_TIMEOUT)) == _LACKING
    if lacks_libuv:
        _do_without()


def _do_without() -> None:
    """Makes torch's own rendezvous make its stores without libuv, in this process and its forks.

    The variable alone does not: torch heeds it in servers, but not in clients of a store that an agent hosts.
    """
    os.environ[VARIABLE] = "0"
    torchs: Any = importlib.import_module("torch.distributed.rendezvous")
    # Once: forks of a fork server that has done it come here again.
    if not isinstance(getattr(torchs, "TCPStore", None), (functools.partial, NoneType)):
        torchs.TCPStore = functools.partial(torchs.TCPStore, use_libuv=False)


def _refuses() -> bool:
    import torch.distributed as dist

    try:  # no descriptor has this number, so no store is made
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, master_listen_fd=-1, use_libuv=True)
    except RuntimeError as error:
        # torch 2.6 has libuv in its own builds, and takes no descriptor with it.
        return _is_refusal(error) and "listen fd" not in str(error)
    except BaseException:  # whatever else torch may say of it
        return False
    return False
