"""Which event loop gates and links have."""

from __future__ import annotations

import asyncio
import sys

import pytest

from mlaunch.rendezvous import event_loop
from tests.processes import said_in_fork


def package() -> str:
    """That of the loop in which a coroutine is run, in a fork: uvloop keeps descriptors."""
    found = []

    async def look() -> None:
        found.append(type(asyncio.get_running_loop()).__module__.partition(".")[0])

    def run() -> str:
        event_loop.run(look())
        return found[0]

    return said_in_fork(run)


def test_uvloops_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvloop")
    monkeypatch.delenv(event_loop.VARIABLE)
    assert package() == "uvloop"


def test_asyncios_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(event_loop.VARIABLE)
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert package() == "asyncio"


def test_asyncios_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(event_loop.VARIABLE, "0")
    assert package() == "asyncio"
