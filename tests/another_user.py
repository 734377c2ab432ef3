"""Another user of this machine: a fork of the tests' process that has given root's rights away."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator

import pytest

_NOBODY = 65534
_GREETING = b"\x00\xce\xf7\x85\x3c" + b"\x0dping"  # of torch's clients: VALIDATE, PING


@contextlib.contextmanager
def by_another_user(say: Callable[[], str], user: int = _NOBODY) -> Iterator[Callable[[], str]]:
    """Has another user do something beside the block; gives what tells, once it is done, what that said."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            os.write(writer, say().encode())
        except OSError as error:
            os.write(writer, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(writer)

    def said() -> str:
        return os.read(reader, 4096).decode()

    try:
        yield said
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)  # one that waits for ever, where a test has failed
        os.waitpid(pid, 0)


def said_by_another_user(say: Callable[[], str]) -> str:
    """Returns what another user says, or the name of the OSError that it meets."""
    with by_another_user(say) as said:
        return said()


def greet(port: int) -> str:
    """Connects to a store as torch's client does; tells whether it is served or turned away."""
    with socket.socket() as end:
        end.settimeout(60)
        end.connect(("127.0.0.1", port))  # create_connection imports what this user may not
        try:
            end.sendall(_GREETING)
            return "served" if end.recv(4) == b"ping" else "turned away"
        except (ConnectionResetError, BrokenPipeError):
            return "turned away"
