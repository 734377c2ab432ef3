"""The adapter between IDEs and ranks, and which ranks wait for an IDE."""

from __future__ import annotations

import json
import socket

import pytest

from mlaunch import Server, launcher
from mlaunch.debug.rank import ide
from mlaunch.rendezvous.address import LOOPBACK
from tests.another_user import said_by_another_user


def test_an_adapter_serves_its_user_alone() -> None:
    """IDEs at one port, at the other the rank, which knows the token."""
    pytest.importorskip("torch", reason="its ranks need torch")
    for_ides, for_rank, token = ide.start_adapter("rank 0 of f()")

    def connect(port: int) -> str:
        with socket.socket() as end:
            end.settimeout(60)
            end.connect((LOOPBACK, port))
            return "served" if end.recv(1) else "turned away"

    turned_away = {"turned away", "ConnectionResetError"}
    assert said_by_another_user(lambda: connect(for_ides)) in turned_away
    assert said_by_another_user(lambda: connect(for_rank)) in turned_away
    with (
        socket.create_connection((LOOPBACK, for_ides)) as editor,
        socket.create_connection((LOOPBACK, for_rank)) as own,
    ):
        for end in (editor, own):
            end.settimeout(60)
            assert end.recv(1)
    assert len(token) == 64


def test_which_ranks_wait() -> None:
    assert [rank for rank in range(12) if ide.is_awaited("debugpy:1,10", rank)] == [1, 10]
    assert all(ide.is_awaited("debugpy", rank) for rank in range(3))
    assert not any(ide.is_awaited(word, 0) for word in ("", "pdb"))


def test_an_ide_that_was_closed_keeps_no_rank(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="its ranks need torch")
    with Server() as server:
        port = server.py_server_port
    at = {"host": "127.0.0.1", "port": port, "server_token": None, "client_token": None, "parent": 1, "path": "/"}

    def run() -> int:
        session = ide.FollowedSession(json.dumps(at), "rank 0 of train()")
        return int(session.run(int, "7"))

    assert launcher(run, 1, device_type="cpu")() == [7]
    assert "rank 0 of train() runs without the IDE that debugs its caller" in capfd.readouterr().err
