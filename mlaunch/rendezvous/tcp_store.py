"""torch's TCPStore: serving one, connecting to one, and its look-ups of host names.

By default, torch serves it with libuv. But the torch of Linux distributions is built without libuv, so the default
raises there, in servers and clients. ``USE_LIBUV=0`` makes torch serve without it. The protocol is the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from mlaunch.base import linux

if TYPE_CHECKING:
    import torch.distributed as dist


VARIABLE = "USE_LIBUV"
# torchrun's variable: with it, no process hosts a store for torch's env:// and tcp://, at any address.
HOSTED_BY_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
_LACKING = 3  # an exit code
_ANSWER_TIMEOUT = 10.0  # seconds for what takes milliseconds
_libc = ctypes.CDLL(None)

lacks_libuv = False  # True once this process has found that out


def serve(listener: socket.socket) -> dist.TCPStore:
    """Serve a store on ``listener`` for as long as the process lives and holds the result.

    Meanwhile this process must not fork: with the store's thread running, the resolver's lock may stay taken for ever
    in the child.
    """
    address, port = listener.getsockname()[:2]
    return _make(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def connect(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Connect to a store. ``timeout``: for the connection, and for each operation."""
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
    """True if torch says that it has no libuv; it does so before it uses the address."""
    return "libuv" in str(error)


def rendezvous(url: str, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Meet at a torch URL with torch's own code, and return its store. Without libuv, if torch has none."""
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
    """Make torch's own rendezvous connect to the store at this address, and host one in rank 0 at any other address.

    For functions, which may use another port as well: torchrun's variable would leave that port without a store. If
    this torch makes its stores in another way, the variable is set anyway.
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
    """Start to find out whether this torch has libuv, in a fork, and return the fork's pid.

    In a fork, because libuv would leave descriptors in this process, and because it takes some milliseconds.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            linux.die_with(parent)
            # With torchrun's variables, a server that cannot listen would become a client, and wait for a server.
            os.environ.clear()
            code = _LACKING if _refuses() else 0
        finally:
            os._exit(code)
    return pid


def hear_of_libuv(pid: int) -> None:
    """Wait for the answer of that fork, and make torch work without libuv if it has none. No answer: torch has it."""
    global lacks_libuv  # noqa: PLW0603 - a fact about this process and its forks
    lacks_libuv = os.waitstatus_to_exitcode(linux.status_within(pid, _ANSWER_TIMEOUT)) == _LACKING
    if lacks_libuv:
        _do_without()


def _do_without() -> None:
    """Make torch's own rendezvous create its stores without libuv, in this process and its forks.

    The variable is not enough: torch reads it in servers, but not in clients of a store that an agent hosts.
    """
    os.environ[VARIABLE] = "0"
    torchs: Any = importlib.import_module("torch.distributed.rendezvous")
    # Only once: this runs again in forks of a fork server that has done it.
    if not isinstance(getattr(torchs, "TCPStore", None), (functools.partial, NoneType)):
        torchs.TCPStore = functools.partial(torchs.TCPStore, use_libuv=False)


def _refuses() -> bool:
    import torch.distributed as dist

    try:  # no descriptor has this number, so no store is made
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, master_listen_fd=-1, use_libuv=True)
    except RuntimeError as error:
        # torch 2.6 has libuv in its own builds, and takes no descriptor with it.
        return _is_refusal(error) and "listen fd" not in str(error)
    except BaseException:  # any other error of torch's is not about libuv
        return False
    return False


def look_up_in_files_only() -> bool:
    """Make this process ask no name server from now on; return False if the C library does not allow that.

    For its log, torch's store asks for the name of each connection's other end. On loopback that is
    ``::ffff:127.0.0.1``, which no hosts file has: a slow name server costs every rank seconds, and a lost packet 5 s.
    """
    return _look_up_in(b"files")


def look_up_as_chosen() -> None:
    """Make this process look names up as the administrator has configured."""
    _look_up_in(_chosen_services())


@contextlib.contextmanager
def from_files_only() -> Iterator[None]:
    """Ask no name server inside this context. Other threads of the process must not look up names meanwhile."""
    # So a call of 64 ranks takes 0.8 s even with a name server that never answers, and not 5 s or more.
    changed = look_up_in_files_only()
    try:
        yield
    finally:
        if changed:
            look_up_as_chosen()


def _look_up_in(services: bytes) -> bool:
    configure = getattr(_libc, "__nss_configure_lookup", None)  # glibc's; getent -s uses it
    return configure is not None and configure(b"hosts", services) == 0


def _chosen_services() -> bytes:
    """Return the services for host names in ``/etc/nsswitch.conf``, or glibc's own default."""
    with contextlib.suppress(OSError):
        for line in Path("/etc/nsswitch.conf").read_bytes().splitlines():
            database, _, services = line.partition(b"#")[0].partition(b":")
            if database.strip() == b"hosts" and services.strip():
                return services.strip()
    return b"files dns"
