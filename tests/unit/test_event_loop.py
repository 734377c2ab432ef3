"""Which event loop gates and links have."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from mlaunch.rendezvous import event_loop


def package() -> str:
    """That of the loop in which a coroutine is run, in a fork: uvloop keeps descriptors."""
    reader, writer = os.pipe()

    async def tell() -> None:
        os.write(writer, type(asyncio.get_running_loop()).__module__.partition(".")[0].encode())

    pid = os.fork()
    if pid == 0:
        try:
            event_loop.run(tell())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as told:
        said = told.read()
    os.waitpid(pid, 0)
    return said


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
