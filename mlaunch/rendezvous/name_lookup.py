"""How a process looks host names up: with name servers, or only in files."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

_libc = ctypes.CDLL(None)


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
