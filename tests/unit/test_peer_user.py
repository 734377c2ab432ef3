"""Whose process is at the other end of a connection on loopback."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlaunch.base.fds import close_all
from mlaunch.debug.rank import ide
from mlaunch.rendezvous import peer_user
from mlaunch.rendezvous.address import LOOPBACK, listen
from mlaunch.rendezvous.peer_user import PeerUser
from tests.another_user import by_another_user
from tests.sandboxes import Said, in_sandbox, own_users


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen() as listener:
        yield listener


@pytest.fixture(params=["netlink", "tables"])
def users(request: pytest.FixtureRequest) -> Iterator[PeerUser]:
    found = PeerUser()
    if request.param == "tables":
        found.close()
        found._kernel = None
    yield found
    found.close()


@pytest.mark.parametrize("host", [LOOPBACK, f"::ffff:{LOOPBACK}"])
def test_this_user_is_known_as_long_as_it_stays(users: PeerUser, listener: socket.socket, host: str) -> None:
    with socket.create_connection((host, listener.getsockname()[1])):
        end, _ = listener.accept()
        assert users.is_ours(end)
    assert not users.is_ours(end)
    end.close()


def test_another_user_is_not_this_one(users: PeerUser, listener: socket.socket) -> None:
    """Root's least of all as it leaves, when its connection looks like one of root's."""

    def connect() -> str:
        with socket.create_connection(listener.getsockname()) as theirs:
            return "gone" if theirs.recv(1) == b"" else "greeted"

    with by_another_user(connect) as said:
        end, _ = listener.accept()
        assert not users.is_ours(end)
        end.close()
        assert said() == "gone"


def test_a_connection_that_was_broken_off_is_nobodys(users: PeerUser, listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()) as theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    end, _ = listener.accept()
    with end:
        assert not users.is_ours(end)


def test_everybody_is_this_user_where_nothing_tells(
    users: PeerUser, listener: socket.socket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peer_user, "_TABLES", [str(tmp_path / "tcp")])
    with socket.create_connection(listener.getsockname()):
        end, _ = listener.accept()
        with end:
            assert users.is_ours(end)


@pytest.mark.parametrize("who", ["ours", "a stranger"])
def test_a_stranger_without_a_number_here_is_not_this_user(listener: socket.socket, who: str) -> None:
    """As in a container that maps a part of the users: all others are shown under the number of its user nobody."""
    port = listener.getsockname()[1]

    def connect() -> str:
        with socket.socket() as end:
            end.connect((LOOPBACK, port))
            end.recv(1)
        return "over"

    def accept() -> str:
        if who == "ours" and os.fork() == 0:
            connect()
            os._exit(0)
        end, _ = listener.accept()
        with end:
            return f"{os.geteuid()} {PeerUser().is_ours(end)}"

    with in_users_of_its_own(accept) as said:
        if who == "ours":
            assert said() == "65534 True"
        else:
            with by_another_user(connect, 4321):
                assert said() == "65534 False"


@contextlib.contextmanager
def in_users_of_its_own(say: Callable[[], str]) -> Iterator[Said]:
    """A fork in a user namespace, as nobody there, whom no user outside has for a number."""
    entered_in, entered = os.pipe()
    mapped_in, mapped = os.pipe()
    ours = [entered_in, mapped_in, mapped, entered]

    def become() -> None:
        own_users()
        os.write(entered, str(os.getpid()).encode())
        os.read(mapped_in, 1)
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as a program that is executed is

    try:
        with in_sandbox(become, say) as said:
            os.close(ours.pop())
            if not (pid := os.read(entered_in, 16).decode()):
                said()  # why there are no such namespaces here, as below another root
            for name in ("gid_map", "uid_map"):
                Path(f"/proc/{pid}/{name}").write_text("0 100000 65536")
            os.write(mapped, b".")
            yield said
    finally:
        close_all(ours)


def test_an_adapter_takes_connections_of_this_user() -> None:
    """Those of others it closes: ``test_an_adapter_serves_its_user_alone``."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        end, _ = listener.accept()
        with end:
            ide.guarded(taken.append)(end)
            assert taken == [end]
