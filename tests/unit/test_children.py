"""The fork server's agents: which one serves the next launch, and which is ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlaunch import LaunchError, launcher
from mlaunch.agent.rank_process import state_of
from mlaunch.base import linux
from mlaunch.caller.launch import start
from mlaunch.forkserver import children as children_module
from mlaunch.forkserver.children import _MOST_LAUNCHES as MOST
from mlaunch.forkserver.children import Child, Children
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import AgentStarted, Reaped
from mlaunch.protocol.server_messages import Free, ServeNext
from tests import processes
from tests.contract.functions import total
from tests.contract.preparing import LIMIT


@pytest.mark.parametrize("killed", [2, 3])
def test_an_agent_that_is_killed_before_it_has_begun_anything_is_replaced(
    killed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one may be that rests, a moment before its next launch."""
    sends: Callable[..., Channel] = start.send_launch
    begun: list[int] = []

    def send(*args: Any, **options: Any) -> Channel:
        begun.append(1)
        if len(begun) > killed:
            return sends(*args, **options)
        ours, theirs = Channel.pair()
        with open(os.pidfd_open(os.getpid()), "rb") as pidfd:
            theirs.send(AgentStarted(os.getpid()), [pidfd.fileno()])
        theirs.send(Reaped(-signal.SIGKILL))
        theirs.close()
        return ours

    monkeypatch.setattr(start, "send_launch", send)
    if killed == 2:
        assert launcher(total, 2)() == [2, 2]
        return
    words = (
        r"the agent was killed by SIGKILL before it could start .*total\(\); 2 others before it ended in the same way"
    )
    with pytest.raises(LaunchError, match=words):
        launcher(total, 2)()


STOPS_IN_PART = """
import os, signal, sys, threading
opens = [(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)]
threading.Thread(target=os.posix_spawnp, args=("true", ["true"], os.environ), kwargs={"file_actions": opens}).start()
signal.pause()
"""


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while state_of(pid) != "T":
        os.sched_yield()


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_an_agent_that_is_about_to_be_stopped_serves_no_launch(tmp_path: Path) -> None:
    """One thread is in vfork, where it cannot stop, until the file has a writer: the kernel tells of no stop yet."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    ours, theirs = Channel.pair()
    process = subprocess.Popen([sys.executable, "-c", STOPS_IN_PART, str(fifo)])
    with ended(process), contextlib.closing(ours), contextlib.closing(theirs):
        while not processes.children(process.pid):
            os.sched_yield()
        try:
            stop(process.pid)
            assert linux.is_stopped(process.pid)
            assert not Child(process.pid, -1, None, is_agent=True, link=ours, rests=True).serves(ServeNext(), [])
        finally:
            fifo.write_bytes(b"")


@pytest.mark.parametrize("order", ["before", "after"])
def test_an_agent_that_is_stopped_as_it_leaves_is_ended(order: str) -> None:
    ours, theirs = Channel.pair()
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    with ended(process), contextlib.closing(theirs):
        child = Child(process.pid, -1, None, is_agent=True, link=ours, rests=True)
        if order == "before":
            stop(process.pid)
        child.dismiss()
        if order == "after":
            stop(process.pid)
            child.end_stopped()
        assert process.wait(LIMIT) == -signal.SIGKILL


def test_an_agent_that_does_not_end_with_its_caller_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a debugger inside of os.fork; within its grace period, and a time of its own, nobody is."""
    monkeypatch.setattr(children_module, "AGENT_TIMEOUT", 0.0)
    monkeypatch.setattr(children_module, "_STOPPED_TIMEOUT", 0.0)
    process = subprocess.Popen(["sleep", "1000"])
    agents = Children()
    agents.add(Child(process.pid, os.pidfd_open(process.pid), None, is_agent=True))
    agents.outlive_caller()
    process.wait()
    assert not processes.alive(process.pid)
    os.close(*agents.fds())


@pytest.mark.parametrize(("launches", "rest"), [([1], 1), ([MOST], 0), ([1, 1], 1), ([MOST, 1], 1)])
def test_how_many_rest(launches: list[int], rest: int) -> None:
    """One at most, and none for ever, since each launch leaves some memory that nobody uses."""
    children, ends = Children(), []
    for number in launches:
        ours, theirs = Channel.pair()
        ends += [ours, theirs]
        children.add(Child(os.getpid(), ours.fileno(), None, is_agent=True, link=ours, launches=number))
        theirs.send(Free())
    ready = children.sources()
    assert len(children.hear_free(ready)) == len(launches)
    assert not children.busy
    assert sum(child.link is not None for child in children) == rest
    assert (children.resting is not None) == bool(rest)
    for end in ends:
        end.close()
