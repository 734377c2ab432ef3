"""Host names: what one may be between machines, and how a process looks them up."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

_libc = ctypes.CDLL(None)


def look_up_in_files_only() -> bool:
    """Makes this process ask no name server from now on; returns False where the C library cannot be told so.

    torch's store asks for the name of each connection's other end, for its log. On loopback that is
    ``::ffff:127.0.0.1``, which no hosts file has: a slow name server costs every rank seconds, a lost packet 5 of them.
    """
    return _look_up_in(b"files")


def look_up_as_chosen() -> None:
    """Makes this process look names up as the administrator chose."""
    _look_up_in(_chosen_services())


@contextlib.contextmanager
def from_files_only() -> Iterator[None]:
    """Does the same for a while. For a process whose other threads look no names up meanwhile."""
    # A call of 64 ranks takes 0.8 s with a name server that never answers, and with none; it took 5 s and more.
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
    """Reads what the administrator chose for looking hosts up."""
    with contextlib.suppress(OSError):
        for line in Path("/etc/nsswitch.conf").read_bytes().splitlines():
            database, _, services = line.partition(b"#")[0].partition(b":")
            if database.strip() == b"hosts" and services.strip():
                return services.strip()
    # glibc's own default, where the file does not say.
    return b"files dns"
