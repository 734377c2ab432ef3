"""Errors of parts that a test has to play: a fork server that says what it should not, failures by the dozen."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mlaunch import LaunchError, launcher
from mlaunch.base import linux
from mlaunch.base.exceptions import RankFailure, describe_exit
from mlaunch.caller import fork_server as server_module
from mlaunch.caller.fork_server import ForkServer
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.report.failure_text import FailureText
from mlaunch.protocol import launch_files
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import Reaped
from mlaunch.protocol.server_messages import DeviceCount, Ready


def fork_server(told: Callable[[Channel], None]) -> ForkServer:
    """The caller's handle to a server that says what the test has it say, and then was killed."""
    ours, theirs = Channel.pair()
    told(theirs)
    theirs.close()
    return ForkServer(ours, 4242, lambda _seconds: -9)


def test_a_fork_server_that_dies_early() -> None:
    server = fork_server(lambda _: None)
    with pytest.raises(LaunchError, match=r"the fork server \(pid 4242\) was killed by SIGKILL before it was ready"):
        server.ready()
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("deadline", [None, 600.0])
def test_a_slow_fork_server_is_told_of_once(deadline: float | None) -> None:
    ours, theirs = Channel.pair()
    server = ForkServer(ours, 4242, lambda _seconds: None)
    ready, told = Ready("2.13.0", None, ()), []

    def on_wait() -> None:
        told.append(1)
        theirs.send(ready)

    assert server.ready(deadline, on_wait) == server.ready(deadline, on_wait) == ready
    assert told == [1]
    theirs.close()
    server._control.close()


def test_a_fork_server_that_says_something_else() -> None:
    server = fork_server(lambda channel: channel.try_send(Reaped(3)))
    with pytest.raises(LaunchError, match=r"sent Reaped\(exitcode=3\) where Ready was expected"):
        server.ready()
    server.close()


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "COUNT_TIMEOUT", 0)
    ours, theirs = Channel.pair()
    server = ForkServer(ours, 4242, lambda _seconds: None)
    with pytest.raises(LaunchError, match=r"failed: their driver has not answered for 0 s; does nvidia-smi, or its"):
        server.count_devices({})
    theirs.close()
    server._control.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (DeviceCount(0, "RuntimeError: no driver"), "counting the accelerators failed: RuntimeError: no driver"),
        (Reaped(-6), r"the counting process died \(Reaped\(exitcode=-6\)\)"),
    ],
)
def test_devices_that_cannot_be_counted(answer: object, words: str) -> None:
    ours, theirs = Channel.pair()
    server = ForkServer(ours, 4242, lambda _seconds: None)

    def count() -> None:
        _, fds = theirs.receive()
        channel = Channel.adopt(fds[1])
        channel.try_send(answer)
        channel.close()
        os.close(fds[0])

    thread = threading.Thread(target=count)
    thread.start()
    with pytest.raises(LaunchError, match=words):
        server.count_devices({})
    thread.join()
    server.close()
    theirs.close()


def test_a_spawned_interpreter_that_dies_before_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="its ranks need torch")
    start = server_module.start_interpreter

    def start_and_kill(environ: dict[str, str]) -> ForkServer:
        server = start(environ)
        server.ready()
        os.kill(server.pid, signal.SIGKILL)
        while server.alive():
            os.sched_yield()
        return server

    monkeypatch.setattr(server_module, "start_interpreter", start_and_kill)
    with pytest.raises(LaunchError, match=r"the fork server .* was killed by SIGKILL before it could start .*<lambda>"):
        launcher(lambda: 1, 1, start_method="spawn")()


def test_stacks_of_a_crash_are_not_written_over(tmp_path: Path) -> None:
    """By the record that the rank has written before, of an exception that it survived."""
    record = tmp_path / "error.json"
    record.write_text('{"message": "earlier"}')
    crash = os.memfd_create("crash")
    os.write(crash, b"Fatal Python error: Segmentation fault")
    launch_files.copy_error_file(str(record), crash)
    assert os.pread(crash, 1000, 0) == b"Fatal Python error: Segmentation fault"
    os.close(crash)


def test_a_refused_prctl() -> None:
    with pytest.raises(OSError, match=r"prctl\(-1, 0\): Invalid argument"):
        linux._prctl(-1, 0)


def test_a_joining_machine_needs_a_port() -> None:
    with pytest.raises(ValueError, match="rank_start=2 with port=0: a machine that joins others must know the port"):
        Options(n_gpus=2, world_size=4, rank_start=2)


def test_a_signal_without_a_name() -> None:
    assert describe_exit(-40) == "was killed by signal 40"


def test_many_consequences_are_cut_short() -> None:
    failures = [RankFailure(rank, 100 + rank, f"raised KeyError: {rank}", consequence=rank > 0) for rank in range(12)]
    text = str(FailureText("train()", failures))
    assert text.count("raised KeyError") == 9
    assert text.endswith("  and 3 more (see .failures)")


def test_consequences_that_are_alike_are_told_once() -> None:
    failures = [RankFailure(rank, 100 + rank, "was killed by SIGKILL", consequence=rank > 0) for rank in range(12)]
    assert str(FailureText("train()", failures)).splitlines()[-1] == "  ranks 1-11 were killed by SIGKILL"


def test_a_long_consequence_is_shortened() -> None:
    failures = [RankFailure(0, 1, "raised A"), RankFailure(1, 2, "raised B: " + "word " * 100 + "\nmore")]
    last = str(FailureText("train()", failures)).splitlines()[-1]
    assert last.startswith("  rank 1 raised B: word word")
    assert last.endswith("... ...")
    assert len(last) < 180


def test_the_place_of_the_rendezvous_server_is_told_as_far_as_known() -> None:
    assert str(FailureText("train()", [RankFailure(None, 7, "was killed by SIGKILL")])) == (
        "the rendezvous server of train() was killed by SIGKILL\n  pid 7"
    )
