"""What a rank does at its end, and how its answer is written."""

from __future__ import annotations

import atexit
import inspect
import multiprocessing.util
import os
import re
import secrets
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mlaunch import LaunchError, Ranks, launcher
from tests.contract import crashes
from tests.processes import wait_gone

# Leaving


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_threads_are_waited_for(tmp_path: Path, start_method: str) -> None:
    """They may use the process group until they end."""

    def train() -> None:
        def work() -> None:
            threading.main_thread().join(1)  # until the function has returned, and a moment more
            total = torch.ones(1)
            dist.all_reduce(total)
            (tmp_path / os.environ["RANK"]).write_text(str(total.item()))

        threading.Thread(target=work).start()

    launcher(train, 2, start_method=start_method)()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["2.0", "2.0"]


def test_an_interrupt_at_the_end_keeps_what_all_have_returned() -> None:
    caller = os.getpid()

    def interrupt() -> None:
        os.kill(caller, signal.SIGINT)
        signal.pause()  # until it is ended

    def train() -> str:
        atexit.register(interrupt)
        return os.environ["RANK"]

    with pytest.raises(KeyboardInterrupt) as raised:
        launcher(train, 1)()
    assert getattr(raised.value, "results", None) == {0: "0"}
    assert "had returned their values" in str(getattr(raised.value, "__notes__", ""))


@pytest.mark.slow
def test_children_are_waited_for(tmp_path: Path) -> None:
    """As by multiprocessing at an interpreter's end: those that are no daemons."""

    def work() -> None:
        rank = multiprocessing.parent_process()
        assert rank is not None
        rank.join(1)  # a moment in which one that did not wait would be gone
        if rank.is_alive():
            (tmp_path / os.environ["RANK"]).touch()

    def train() -> None:
        multiprocessing.get_context("fork").Process(target=work).start()

    launcher(train, 2)()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.slow
def test_children_of_the_caller_are_left_alone() -> None:
    """Under "fork" a rank inherits what multiprocessing knows of them, and would end the daemons among them."""
    context = multiprocessing.get_context("fork")
    theirs = [context.Process(target=signal.pause, daemon=daemon) for daemon in (True, False)]
    for process in theirs:
        process.start()
    try:
        assert launcher(lambda: 1, 2, start_method="fork")() == [1, 1]
        assert [process.exitcode for process in theirs] == [None, None]
    finally:
        for process in theirs:
            process.terminate()
            process.join()
            process.close()


@pytest.mark.parametrize("code", [0, 3])
def test_exit_handlers_run_after_sys_exit(tmp_path: Path, code: int) -> None:
    def train() -> None:
        atexit.register((tmp_path / os.environ["RANK"]).touch)
        sys.exit(code)

    if code:
        with pytest.raises(LaunchError, match=r"rank 0 of .* exited with code 3"):
            launcher(train, 1)()
    else:
        with pytest.warns(RuntimeWarning, match="exited with code 0 without returning a value"):
            launcher(train, 1)()
    assert (tmp_path / "0").exists()


def c_exit(code: int) -> None:
    import ctypes

    ctypes.CDLL(None).exit(code)


class ExitsThere(Exception):
    """Ends who unpickles it, as no Python code can see."""

    def __reduce__(self) -> tuple[Any, ...]:
        return self.args


class ExitsHere:
    def __init__(self, how: Any) -> None:
        self.how = how

    def __reduce__(self) -> str:
        self.how(0)
        return "never"


@pytest.mark.nightly(  # each pair once
    *("rec*-forkserver-c_exit", "rec*-fork-_exit", "send*-forkserver-_exit", "send*-fork-c_exit"),
    *("rep*-forkserver-c_exit", "rep*-fork-_exit"),
)
@pytest.mark.slow
@pytest.mark.parametrize("how", [os._exit, c_exit])
@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
@pytest.mark.parametrize("phase", ["receiving the function", "sending its value", "reporting an exception"])
def test_an_exit_with_code_0_outside_the_function_is_an_error(how: Any, start_method: str, phase: str) -> None:
    def train(_given: Any) -> Any:
        if phase == "reporting an exception":
            raise ExitsThere(how, (0,))
        return ExitsHere(how)

    given = ExitsThere(how, (0,)) if phase == "receiving the function" else None
    if given is not None and start_method == "fork":
        pytest.skip("a fork receives nothing")
    with pytest.raises(LaunchError, match="exited with code 0") as caught:
        launcher(train, 2, start_method=start_method)(given)
    assert f"while {phase}" in str(caught.value)


class Late:
    """An argument that rank 1 lets go of only when rank 0 is gone."""

    def __del__(self) -> None:
        if os.environ.get("RANK") == "1":
            wait_gone([int(Path(os.environ["OTHER"]).read_text())])


def test_exit_handlers_run_in_a_rank_that_is_not_back_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has answered, and its caller closes the ranks before it waits for the next call."""
    monkeypatch.setenv("OTHER", str(tmp_path / "pid"))

    def train(_: object) -> None:
        if os.environ["RANK"] == "0":
            (tmp_path / "pid").write_text(str(os.getpid()))
        dist.barrier()
        atexit.register((tmp_path / os.environ["RANK"]).touch)

    with Ranks(n_gpus=2) as ranks:
        ranks.run(train, Late())
    assert (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()


@pytest.mark.slow
def test_a_checkpoint_that_is_being_saved_is_complete(tmp_path: Path) -> None:
    """As under torchrun: the group is there until its threads have ended."""

    def train() -> None:
        from torch.distributed import checkpoint

        state = {"weights": torch.arange(200_000.0), "rank": torch.tensor(dist.get_rank())}
        checkpoint.async_save(state, checkpoint_id=str(tmp_path / "saved"))

    launcher(train, 2)()

    from torch.distributed import checkpoint

    takes_no_dist = "no_dist" in inspect.signature(checkpoint.load).parameters  # not in torch 2.6, which finds it out
    loaded = {"weights": torch.zeros(200_000), "rank": torch.tensor(-1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is no group here
        checkpoint.load(loaded, checkpoint_id=str(tmp_path / "saved"), **({"no_dist": True} if takes_no_dist else {}))
    assert torch.equal(loaded["weights"], torch.arange(200_000.0))
    assert (tmp_path / "saved" / ".metadata").exists()


# What is no end of the function's


def test_leaving_while_arguments_are_unpickled_is_a_failure() -> None:
    """The function has not run."""
    with pytest.raises(LaunchError, match=r"raised SystemExit: 0\n.* while receiving the function"):
        launcher(crashes.unpickling, 2)(Leaves())


class Leaves:
    """Ends whoever unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (0,)


def test_a_value_that_leaves_when_it_is_unpickled() -> None:
    with pytest.raises(LaunchError, match=r"the value that rank 0 of .* cannot be unpickled here: SystemExit: 0"):
        launcher(Leaves, 1)()


def test_leaving_while_a_rank_leaves_is_its_end() -> None:
    """Its value is there: a finaliser of multiprocessing's ends the process, with success."""

    def train() -> int:
        multiprocessing.util.Finalize(None, sys.exit, args=(0,), exitpriority=1)
        return 7

    assert launcher(train, 1)() == [7]


# Answers


class Burns:
    """Cannot be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise ValueError("no such luck")


def test_a_value_that_fails_in_pickling_after_a_large_part_of_it() -> None:
    """Nothing of what was written is in the way of the report."""
    words = r"rank 0 of .* returned a value that cannot be pickled: .*no such luck"
    with pytest.raises(LaunchError, match=words) as raised:
        launcher(lambda: [bytes(5_000_000), np.zeros(1_000_000), list(range(100_000)), Burns()], 1)()
    assert len(str(raised.value)) < 2000


# What others tidy up


def shared_files(mark: str) -> list[str]:
    """What has this in its name: others have blocks, tensors and semaphores there meanwhile."""
    return [name for name in os.listdir("/dev/shm") if mark in name]


@pytest.fixture
def mark() -> str:
    """What the names of a test's blocks have in them, and no others."""
    return secrets.token_hex(8)


def makes_a_block(mark: str) -> None:
    block = shared_memory.SharedMemory(f"psm_{mark}_{os.getpid()}", create=True, size=1)
    if os.fork() == 0:  # a worker, which holds what the tracker waits for
        signal.pause()
    _blocks.append(block)


_blocks: list[object] = []


def makes_a_block_and(mark: str, end: Callable[[], object]) -> None:
    makes_a_block(mark)
    dist.barrier()  # who is killed while multiprocessing makes a block may leave one that no tracker knows of
    end()


def shares_files() -> tuple[str, int]:
    torch.multiprocessing.set_sharing_strategy("file_system")
    _blocks.append(torch.ones(1000).share_memory_())
    mark = f"torch_{os.getpid()}_"
    return mark, len(shared_files(mark))


def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kills_its_agent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


@pytest.mark.parametrize("end", [crashes.raise_error, kills_itself, kills_its_agent], ids=["raises", "killed", "agent"])
def test_a_block_of_a_rank_that_fails_is_removed_by_its_tracker(mark: str, end: Callable[[], object]) -> None:
    with pytest.raises((ValueError, LaunchError)):
        launcher(makes_a_block_and, 2)(mark, end)
    assert not shared_files(mark)


def loses_its_tracker() -> str:
    block = shared_memory.SharedMemory(create=True, size=5000)
    _blocks.append(block)
    os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)  # type: ignore[attr-defined]
    return block.name


def test_files_that_nobody_is_left_to_remove_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    [name] = launcher(loses_its_tracker, 1)()
    os.unlink(f"/dev/shm/{name}")
    words = rf"mlaunch: nobody is left to remove /dev/shm/{name} on host \S+: 4.9 KiB of memory, which loses_"
    assert re.search(words, capfd.readouterr().err)


@pytest.mark.slow
def test_a_block_of_a_rank_that_is_forced_to_end_is_removed_by_its_tracker(mark: str) -> None:
    """Its group is not killed with it."""

    def train() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        makes_a_block(mark)
        crashes.hang()

    with pytest.raises(LaunchError):
        launcher(train, 1, deadline=5, grace_period=0.1)()
    assert not shared_files(mark)


@pytest.mark.slow
def test_files_of_tensors_are_removed_by_torchs_manager() -> None:
    [(mark, count)] = launcher(shares_files, 1)()
    assert count == 1
    assert not shared_files(mark)


def wants_a_directory(how: str) -> str:
    """Returns where multiprocessing keeps files, in a rank or its child; the launch may fail meanwhile."""
    mine = multiprocessing.util.get_temp_dir()
    child = multiprocessing.get_context("fork").Process(target=multiprocessing.util.get_temp_dir)
    child.start()
    child.join()
    dist.barrier()
    if how != "returns":
        os.kill(os.getppid() if how == "its agent is killed" else os.getpid(), signal.SIGKILL)
        signal.pause()
    return mine


@pytest.mark.parametrize("how", ["returns", "a rank is killed", "its agent is killed"])
def test_what_multiprocessing_keeps_in_files_goes_with_the_launch(how: str, tmp_path: Path) -> None:
    call = launcher(wants_a_directory, 2, env={"TMPDIR": str(tmp_path)})
    if how == "returns":
        mine, its = call(how)
        assert mine == its
        assert mine.startswith(f"{tmp_path}/mlaunch-")
    else:
        with pytest.raises(LaunchError):
            call(how)
        launcher(os.getpid, 1)()  # by then the fork server has reaped the agent
    assert list(tmp_path.iterdir()) == []


def test_what_multiprocessing_starts_is_told_where_files_go(tmp_path: Path) -> None:
    """A fresh interpreter, too, whatever its parent has wanted before."""

    def told() -> str:
        process: Any = multiprocessing.get_context("spawn").Process(target=print)
        return str(process._config["tempdir"])

    [place] = launcher(told, 1, env={"TMPDIR": str(tmp_path)})()
    assert place.startswith(f"{tmp_path}/mlaunch-")
    assert launcher(os.listdir, 1, env={"TMPDIR": str(tmp_path)})(tmp_path) == [[]]  # where nobody wants it
    assert list(tmp_path.iterdir()) == []
