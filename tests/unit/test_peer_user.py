"""Whose process is at the other end of a connection on loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlaunch.rendezvous import peer_user
from mlaunch.rendezvous.address import LOOPBACK, listen
from mlaunch.rendezvous.peer_user import PeerUser
from tests.another_user import by_another_user


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
