"""Which event loop gates and links have."""

from __future__ import annotations

import asyncio
import socket
import sys

import pytest

from mlaunch.machines.gate import UVLOOP, run_in_loop
from mlaunch.machines.wire import control_protocol
from tests.processes import said_in_fork


def package() -> str:
    """That of the loop in which a coroutine is run, in a fork: uvloop keeps descriptors."""
    found = []

    async def look() -> None:
        found.append(type(asyncio.get_running_loop()).__module__.partition(".")[0])

    def run() -> str:
        run_in_loop(look())
        return found[0]

    return said_in_fork(run)


def test_uvloops_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvloop")
    monkeypatch.delenv(UVLOOP)
    assert package() == "uvloop"


def test_asyncios_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UVLOOP)
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert package() == "asyncio"


def test_asyncios_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UVLOOP, "0")
    assert package() == "asyncio"


@pytest.mark.parametrize("uvloop", ["1", "0"])
@pytest.mark.parametrize("aborted", [False, True])
def test_a_closed_connection_is_one_kind_of_error(monkeypatch: pytest.MonkeyPatch, uvloop: str, aborted: bool) -> None:
    """Whatever the loop says of it, and whoever has closed it."""
    monkeypatch.setenv(UVLOOP, uvloop)

    async def write() -> str:
        ours, theirs = socket.socketpair()
        with theirs:
            _, writer = await asyncio.open_connection(sock=ours)
            if aborted:
                writer.transport.abort()
            else:
                writer.close()
            await writer.wait_closed()
            try:
                await control_protocol.send(writer, {"over": 1})
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        return "nothing"

    def run() -> str:
        found = []

        async def note() -> None:
            found.append(await write())

        run_in_loop(note())
        return found[0]

    assert said_in_fork(run) == "ConnectionResetError: the connection was closed"
