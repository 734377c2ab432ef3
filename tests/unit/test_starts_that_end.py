"""A fork server that still imports: it ends with its caller, or with the caller's wish, and not with the import."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlaunch.caller.fork_server import ForkServer, Interpreter, start_interpreter
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.server_messages import Ready

pytest.importorskip("torch", reason="its ranks need torch")

LIMIT = 60.0  # seconds
# It says that it is there, and waits in C, where Python runs no handler of a signal.
SLOW = """
import os
with open("{begun}", "w"):
    pass
with open("{go}"):
    pass
"""


@pytest.fixture
def importing(tmp_path: Path) -> Iterator[ForkServer]:
    """Begins to import a module that takes for ever."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    os.mkfifo(begun)
    os.mkfifo(go)
    (tmp_path / "slow_module.py").write_text(SLOW.format(begun=begun, go=go))
    server = start_interpreter(os.environ, Interpreter(path=[str(tmp_path), *sys.path], preload=("slow_module",)))
    begun.read_text()
    yield server
    server.close()


def test_its_caller_is_killed(importing: ForkServer) -> None:
    importing._control.close()  # as the caller's end does
    assert importing._wait(LIMIT) == -signal.SIGKILL


def test_it_is_replaced_while_somebody_waits_for_it(importing: ForkServer, tmp_path: Path) -> None:
    """Who waits gets its word; it ends afterwards, as it is told again."""
    importing.retire()
    (tmp_path / "go").write_text("")
    assert importing.ready().backends
    importing.retire()
    assert importing._wait(LIMIT) == 0


def test_one_that_was_asked_for_nothing_is_killed_at_once() -> None:
    """Whatever it does: here it has said that it is ready, and does not hear that its caller wants it no more."""
    ours, theirs = Channel.pair()
    theirs.send(Ready("2.13.0", None, ()))
    done: list[str] = []

    def wait(seconds: float) -> int | None:
        done.extend(["waited for"] * bool(seconds))
        return -signal.SIGKILL if "killed" in done else None

    server = ForkServer(ours, os.getpid(), wait, lambda: done.append("killed"))
    server.ready()
    server.close(LIMIT)
    assert done == ["killed", "waited for"]
    theirs.close()
