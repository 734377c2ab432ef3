"""What a rank or a caller does to descriptors and pids that it inherited: forks that return, closed descriptors."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mlaunch import LaunchError, LaunchTimeout, launcher
from tests import launches
from tests.contract import crashes
from tests.contract.preparing import TRIES

pytestmark = pytest.mark.usefixtures("the_next_call_works")
MINE = "what the user wrote"


# Forks of a rank


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_a_fork_that_returns_does_not_answer(size: int) -> None:
    """Both processes come back from the function, at the same time."""

    def train() -> tuple[int, int, bytes]:
        rank = os.getpid()
        os.fork()
        return rank, os.getpid(), bytes([os.getpid() != rank]) * size

    for rank, answered, content in launcher(train, 2)():
        assert answered == rank
        assert content == bytes(size)


def test_a_fork_that_returns_is_told_what_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        if os.fork() == 0:
            print("what it said before", end="")
        else:
            os.wait()  # else it may be gone with its rank before it says a word

    launcher(train, 2)()
    out, err = capfd.readouterr()
    assert "has returned from the function as if it were the rank; it is ended here" in err
    assert "what it said before" in out


class Forked:
    """Forks while it is pickled: both processes go on writing."""

    def __reduce__(self) -> tuple[Any, ...]:
        rank = os.getpid()
        if os.fork() != 0:
            os.wait()  # the fork writes first
        return (lambda same, tensor: (same, tensor)), (os.getpid() == rank, torch.full((100_000,), 1.0))


def test_a_fork_while_a_value_is_pickled() -> None:
    for mine, tensor in launcher(Forked, 2, deadline=20)():
        assert mine
        assert torch.equal(tensor, torch.ones(100_000))


def test_how_a_fork_ends_is_its_own_business(capfd: pytest.CaptureFixture[str]) -> None:
    """Its exit code is what it gave, its exception is printed, and the rank is not said to have raised it."""

    def train() -> list[int]:
        codes = []
        for end in (lambda: sys.exit(0), lambda: sys.exit(3), crashes.raise_error):
            if os.fork() == 0:
                end()
            codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
        if dist.get_rank() == 1:
            if os.fork() == 0:
                return codes
            os.wait()
            sys.exit(0)  # which is the rank's own end, in the phase that it is in
        return codes

    with pytest.warns(RuntimeWarning, match="^rank 1 of .* exited with code 0 without"):
        assert launcher(train, 2)() == [[0, 3, 1], None]
    assert "ValueError: no such luck" in capfd.readouterr().err


# Closed descriptors


def close_and_open(directory: Path) -> list[Any]:
    """As a program that becomes a daemon: closes all that it did not open, then opens files of its own."""
    crashes.close_descriptors()
    files = [open(directory / f"{os.environ['RANK']}-{number}", "w+") for number in range(50)]  # noqa: SIM115
    for file in files:
        file.write(MINE)
        file.flush()
    return files


def returns(files: list[Any]) -> int:
    return len(files)


def raises(_: list[Any]) -> None:
    crashes.raise_error()


def hangs(_: list[Any]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # or it might end before it hears that its stacks are asked for
    crashes.hang()


def segfaults(_: list[Any]) -> None:
    ctypes.string_at(1)


CLOSED = "unable to answer: its function closed mlaunch's file descriptors"


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
@pytest.mark.parametrize(
    ("end", "kind", "words"),
    [
        (returns, LaunchError, CLOSED),
        (raises, LaunchError, CLOSED),
        pytest.param(hangs, LaunchTimeout, "rank 1 had not returned", marks=pytest.mark.slow),
        (segfaults, LaunchError, "rank 1 of .* was killed by SIGSEGV"),
    ],
)
def test_files_that_took_our_numbers_stay_as_they_are(
    tmp_path: Path, end: Callable[[list[Any]], object], kind: type[LaunchError], words: str, start_method: str
) -> None:
    def train() -> object:
        return end(close_and_open(tmp_path)) if dist.get_rank() == 1 else dist.get_rank()

    with pytest.raises(kind, match=words):
        launcher(train, 2, deadline=1.5 if end is hangs else None, grace_period=0.5, start_method=start_method)()
    assert {path.read_text() for path in tmp_path.iterdir()} == {MINE}
    assert len(list(tmp_path.iterdir())) == 50


def test_a_fork_of_a_rank_leaves_such_files_alone(tmp_path: Path) -> None:
    """It lets go of what the rank answers with, but not of what has taken its place."""

    def train() -> None:
        files = close_and_open(tmp_path)
        if os.fork() == 0:
            for file in files:
                file.write(MINE)
                file.flush()
            os._exit(0)
        os.wait()

    with pytest.raises(LaunchError, match=CLOSED):
        launcher(train, 1)()
    assert {path.read_text() for path in tmp_path.iterdir()} == {2 * MINE}


class ClosesPipes:
    """Closes descriptors while it is pickled, that of the rank's queue among them, and opens files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __reduce__(self) -> tuple[Any, ...]:
        numbers = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
        for fd in numbers:
            with contextlib.suppress(FileNotFoundError):  # the listing's own
                if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:"):
                    os.close(fd)
        self.files = [open(self.directory / f"{number}", "w+") for number in range(10)]  # noqa: SIM115
        for file in self.files:
            file.write(MINE)
            file.flush()
        return int, ()


def test_files_that_take_our_numbers_while_a_value_is_pickled(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=CLOSED):
        launcher(lambda: ClosesPipes(tmp_path), 1, deadline=20)()
    assert {path.read_text() for path in tmp_path.iterdir()} == {MINE}


def test_a_rank_that_closes_all_numbers() -> None:
    """As above with os.closerange, after which gloo may abort the process before it can say why."""

    def train() -> int:
        if dist.get_rank() == 1:
            os.closerange(3, 65536)
        return 1

    with pytest.raises(LaunchError, match=f"rank 1 of (.|\n)*({CLOSED}|was killed by SIGABRT)"):
        launcher(train, 2)()


CLOSING_CALLER = """
import os
from mlaunch import launcher

print(launcher(lambda: 7, 2)())
os.closerange(3, 1000)
files = [open(f"file{number}", "w+") for number in range(50)]
for file in files:
    file.write("mine")
    file.flush()
print(launcher(lambda: 8, 2)())
print(launcher(lambda: 9, 2)())
assert all(os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)) for file in files)
print({open(file.name).read() for file in files})
"""


@pytest.mark.nightly
def test_a_caller_that_closes_all_numbers(run_script: Any) -> None:
    done = run_script(CLOSING_CALLER)
    assert done.stdout == "[7, 7]\n[8, 8]\n[9, 9]\n{'mine'}\n", done.stderr


# Descriptors and programs


def test_a_program_that_a_rank_becomes_inherits_none_of_ours(capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        dist.destroy_process_group()
        gc.collect()  # gloo's own it would inherit
        os.execvp("ls", ["ls", "/proc/self/fd/"])

    with pytest.warns(RuntimeWarning, match="^rank 0 of .* exited with code 0 without"):
        launcher(train, 1)()
    assert capfd.readouterr().out.split("[0] ")[1:] == ["0\n", "1\n", "2\n", "3\n"]  # 3: the directory that ls reads


def held() -> list[str]:
    """Returns the pipes, sockets and memory files of this process, except gloo's sockets; without their numbers."""
    unix = {f"socket:[{line.split()[6]}]" for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]}
    files = [os.path.basename(os.path.realpath(f"/proc/self/fd/{fd}")) for fd in os.listdir("/proc/self/fd")]
    ours = [file for file in files if file in unix or file.startswith(("pipe:", "memfd:"))]
    return sorted(re.sub(r"\d+", "", file) for file in ours)


@pytest.mark.slow
def test_no_rank_holds_another_ones_channels() -> None:
    """Whose end would then not be seen. Each holds what a single one of the same agent does."""
    for _ in range(TRIES):  # until one has served all three: it has a pipe of libuv's from its first launch on
        agents = launcher(os.getppid, 1)()
        ((before, alone),) = launcher(held_by, 1)()
        found = launcher(held_by, 3)()
        if len({*agents, before, found[0][0]}) == 1:
            break
    assert [held for _, held in found] == [alone] * 3


def held_by() -> tuple[int, list[str]]:
    """Returns the agent of this rank, and what the rank holds."""
    return os.getppid(), held()


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 2])
def test_nor_do_ranks_that_are_forked_in_several_goes(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches.fork_at_once(monkeypatch, at_once)  # the agent of "fork" is a fork of this process
    (alone,) = launcher(held, 1, start_method="fork")()
    assert launcher(held, 3, start_method="fork")() == [alone] * 3


def test_an_agent_holds_no_end_of_its_ranks_streams() -> None:
    """A rank that writes when nobody reads any more would wait for ever."""

    def found_there() -> list[str]:
        streams = {os.readlink(f"/proc/self/fd/{fd}") for fd in (1, 2)}
        agent, found = Path(f"/proc/{os.getppid()}/fd"), []
        for fd in agent.iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(fd))
        return [name for name in found if name in streams]

    assert launcher(found_there, 2)() == [[], []]


@pytest.mark.slow
def test_standard_input_is_empty() -> None:
    """Under "fork" too, where a rank could read what its caller's terminal is given."""

    def train() -> tuple[str, bytes]:
        return sys.stdin.read(), os.read(0, 10)

    before, (reader, writer) = os.dup(0), os.pipe()
    os.write(writer, b"of the caller\n")
    os.dup2(reader, 0)
    try:
        assert launcher(train, 2, start_method="fork", deadline=20)() == [("", b"")] * 2
        assert launcher(train, 2, deadline=20)() == [("", b"")] * 2
    finally:
        os.dup2(before, 0)
        for fd in (before, reader, writer):
            os.close(fd)


# A rank's session


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_each_rank_leads_a_session(start_method: str) -> None:
    """Of which each has an equal share of a busy machine (autogroups)."""
    found = launcher(lambda: (os.getsid(0), os.getpgrp(), os.getpid()), 2, start_method=start_method)()
    assert all(len(set(ids)) == 1 for ids in found)
    assert len(set(found)) == 2
