"""Why ranks hang: the culprit and its line are named, whatever holds it up."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import tempfile
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from mlaunch import LaunchError, Ranks, launcher
from tests import launches
from tests.contract.test_engine_calls import Threads
from tests.hang_scenes import SCENES
from tests.healthy_runs import healthy
from tests.processes import wait_until

pytestmark = pytest.mark.usefixtures("the_next_call_works")
AT = r"at test_hangs.py:\d+"
LATE = rf"rank 1 has not entered all_reduce #\d+ of the default group \(ranks 0, 2 wait for it, in all_reduce {AT}\); "


def wait() -> None:
    threading.Event().wait()


def in_a_lock() -> None:
    lock = threading.Lock()
    with lock, lock:
        pass


def handling() -> None:
    try:
        raise ValueError
    except ValueError:
        wait()


def at_last() -> None:
    try:
        pass
    finally:
        wait()


class Stopping(Dataset[int]):
    """Its worker is stopped as it loads."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGSTOP)
        return index


def loading() -> None:
    for _ in DataLoader(Stopping(), num_workers=1):
        pass


class Stuck(Stopping):
    """Its worker waits in the kernel, as for a disk: for a child that shares its memory and opens a pipe first."""

    def __getitem__(self, index: int) -> int:
        pipe = os.path.join(tempfile.mkdtemp(), "pipe")
        os.mkfifo(pipe)
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, pipe, os.O_RDONLY, 0)])
        return index


def loading_from_what_is_stuck() -> None:
    for _ in DataLoader(Stuck(), num_workers=1):
        pass


def holding_the_interpreter() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


def computing() -> None:
    one = torch.ones(300, 300)
    while True:
        one @ one


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def in_another_operation() -> None:
    dist.broadcast(torch.ones(1), 0)


def leave() -> None:
    raise Left


class Left(Exception):
    """A rank is to return before the others."""


def fewer_batches() -> None:
    """The others go on in the loop."""
    dist.barrier()


def hold_up(by: Callable[[], None]) -> None:
    dist.barrier()
    try:
        if dist.get_rank() == 1:
            by()
    except Left:
        return
    dist.all_reduce(torch.ones(1))


def be_slow(_: object) -> None:
    """All wait for a device that does not come back, in code that stands where torch's collectives do."""
    names: dict[str, Any] = {}
    file = os.path.join(os.path.dirname(dist.__file__), "of_a_slow_device.py")
    exec(compile("def all_reduce(done):\n    done.wait()", file, "exec"), names)
    dist.barrier()
    names["all_reduce"](threading.Event())


def cross(_: object) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    if dist.get_rank() == 1:
        groups.reverse()
    if dist.get_rank() < 2:
        dist.all_reduce(torch.ones(1), group=groups[0])
        dist.all_reduce(torch.ones(1), group=groups[1])
    dist.barrier()


CASES = {
    wait: rf"{LATE}rank 1 is in wait {AT}",
    in_a_lock: rf"{LATE}rank 1 is in in_a_lock {AT}",
    handling: rf"{LATE}rank 1 is in wait {AT}, handling an exception",
    at_last: rf"{LATE}rank 1 is in wait {AT}, in a finally block",
    loading: rf"{LATE}rank 1 is in __next__ {AT}; its child \(pid \d+\): it was stopped by a signal",
    loading_from_what_is_stuck: rf"{LATE}rank 1 is in __next__ {AT}; its child \(pid \d+\): it waits in the kernel",
    leave: rf"rank 1 has returned \(ranks 0, 2 wait for it, in all_reduce {AT}\)",
    fewer_batches: r"the ranks are in different operations that stand for the same one: ranks 0, 2 are in all_reduce "
    rf"{AT}; rank 1 is in barrier {AT}",
    be_slow: r"all ranks are in all_reduce, and none is behind: the device or the network is slow or stuck, or much is",
    holding_the_interpreter: r"rank 1 does not answer \(ranks 0, 2 wait for it, in all_reduce .*\); rank 1 was in match"
    rf" {AT}, where its control thread does not answer",
    computing: rf"{LATE}rank 1 is in computing {AT}",
    stopped: r"rank 1 does not answer \(ranks 0, 2 wait for it, .*\); rank 1 was running the function \(it was stopped",
    in_another_operation: r"the ranks are in different operations that stand for the same one: ranks 0, 2 are in "
    rf"all_reduce {AT}; rank 1 is in broadcast {AT}",
    cross: r"ranks wait for each other, as they have entered groups in crossed order: rank 0 waits for rank 1 in the "
    rf"group of ranks 0-1 that torch calls '\w+', in all_reduce {AT}; rank 1 waits for rank 0 in the group of ",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_rank_that_holds_up_the_others_is_named(case: Callable[[], None], tmp_path: Path) -> None:
    function, own = case if case in {cross, be_slow} else hold_up, {"TMPDIR": str(tmp_path)}
    run = launcher(function, 3, grace_period=0.2, env=own).submit(case)
    said: list[str] = []

    def is_said() -> bool:
        said.append(run.why())
        return re.match(CASES[case], said[-1]) is not None

    try:
        wait_until(is_said)
    finally:
        assert run.cancel(), said[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "who_has_sent_more_is_behind",
        "chain_of_receives",
        "tags_that_differ",
        "ahead_and_asleep",
        "the_second_of_three_asynchronous",
        "new_group_without_one",
        "in_a_thread",
        pytest.param("gradients_after_messages", marks=pytest.mark.nightly),
        "after_a_monitored_barrier",
    ],
)
def test_why_in_scenes(name: str) -> None:
    """Some of them; ``python -m tests.hang_storm`` makes all."""
    scene = SCENES[name]
    run = launcher(scene.function, scene.ranks, device_type="cpu", grace_period=0.2).submit()
    said: list[str] = []

    def is_said() -> bool:
        said.append(run.why())
        return re.match(scene.said, said[-1]) is not None

    try:
        wait_until(is_said)
    finally:
        assert run.cancel(), said[-1]


@pytest.mark.slow
def test_a_deadline_says_the_same() -> None:
    scene = SCENES["chain_of_receives"]
    with pytest.raises(LaunchError) as caught:
        launcher(scene.function, scene.ranks, device_type="cpu", deadline=6, grace_period=0.2)()
    assert re.match(scene.said, str(caught.value).split("\n")[1])


def test_what_torch_raises_has_no_frame_of_the_watch() -> None:
    def fail() -> None:
        dist.broadcast(torch.ones(1).to_sparse(), 0)

    with pytest.raises(NotImplementedError) as caught:
        launcher(fail, 1, device_type="cpu")()
    assert "distributed_c10d.py" in str(caught.value.__cause__)
    assert "operations.py" not in str(caught.value.__cause__)


@pytest.mark.nightly(
    *("in_a_lock", "handling", "at_last", "loading*", "leave", "fewer_batches", "be_slow", "holding*", "computing"),
    "in_another*",
)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_rank_that_holds_up_the_others_is_named_on_two_machines(
    case: Callable[[Any], None], tmp_path: Path
) -> None:
    """Whose ranks 0 and 1 are on one, and rank 2 on the other."""
    function, own = case if case in {cross, be_slow} else hold_up, {"TMPDIR": str(tmp_path)}
    ours = launcher(function, 2, engine=Threads(), grace_period=0.2, env=own)
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(ours, case)
        try:
            wait_until_said(ours, call, CASES[case])
        finally:
            while not call.done():
                for name in launches.ids_of(function.__qualname__):
                    launches.ask("end", name)
                futures.wait([call], 0.1)
    with pytest.raises(LaunchError):
        call.result()


def wait_until_said(ours: Any, call: Future[Any], pattern: str) -> None:
    """Wait until ``why()`` says it of each machine's part, too, as they are all here. Raise what has ended the call."""
    said: list[str] = []

    def is_said() -> bool:
        if call.done():
            pytest.fail(f"the call is over before this was said: {call.result()}")
        said.append(ours.why())
        return re.search(pattern, said[-1], re.MULTILINE) is not None

    try:
        wait_until(is_said)
    except AssertionError:
        pytest.fail(f"why() said at last: {said[-1]!r}")


@pytest.mark.slow
def test_ranks_of_two_machines(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")

    def read() -> None:
        try:
            raise ValueError
        except ValueError:
            (tmp_path / "go").read_text()

    ours = launcher(hold_up, 2, engine=Threads())
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(ours, read)
        try:
            wait_until_said(ours, call, rf"{LATE}rank 1 is in read_text {AT}, handling an exception")
        finally:
            if not call.done():
                (tmp_path / "go").write_text("x")
    call.result()


@pytest.mark.parametrize("kind", ["shape", "dtype"])
def test_tensors_that_do_not_fit_together(kind: str) -> None:
    def meet() -> None:
        first = dist.get_rank() == 0
        whole: Any = torch.ones(10 if first or kind == "dtype" else 1000)
        dist.all_reduce(whole if first or kind == "shape" else whole.double())

    with pytest.raises(LaunchError) as caught:
        launcher(meet, 2, deadline=60.0)()
    assert "was killed by SIGABRT" in str(caught.value)
    assert "has another shape or dtype than another rank's. With TORCH_DISTRIBUTED_DEBUG=DETAIL" in str(caught.value)


def test_a_rank_that_is_dead() -> None:
    """Which ends the launch; the report says where the others waited for it."""

    def die() -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(LaunchError) as caught:
        launcher(die, 3)()
    assert str(caught.value).startswith("rank 1 of test_a_rank_that_is_dead.<locals>.die() was killed by SIGKILL")


@pytest.mark.slow
def test_a_rank_that_stays_and_is_out_of_step() -> None:
    with Ranks(n_gpus=3) as ranks:
        future = ranks.submit(hold_up, in_a_lock)

        def is_said() -> bool:
            return any(re.match(CASES[in_a_lock], launches.why(name)) for name in launches.ids_of("hold_up"))

        wait_until(is_said)
        ranks.terminate()
    assert future.cancelled() or future.exception() is not None


@pytest.mark.nightly
@pytest.mark.slow
def test_slow_runs_that_are_healthy_are_not_accused() -> None:
    """One of most kinds; ``python -m tests.healthy_runs`` makes more."""
    found = healthy(8)
    assert (found.runs, found.accused) == (8, [])
    assert found.judged >= 6


def count_signals(folder: Path) -> int:
    """Returns how often this rank was asked by a signal while it worked."""
    asked: list[int] = []
    faulthandler.unregister(launches.STACK_SIGNAL)
    signal.signal(launches.STACK_SIGNAL, lambda number, _: asked.append(number))
    (folder / "works").touch()
    while not (folder / "enough").exists():
        sum(range(1000))
    return len(asked)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:start_method='fork' in a process with")
def test_ranks_that_work_are_not_interrupted_to_say_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that comes as C code enters the interpreter would end a rank of Python 3.11 or 3.12 by SIGSEGV."""
    # A rank on a busy machine may need longer than users wait for; its agent is a fork of this process.
    launches.be_patient(monkeypatch, "places", 60.0)
    launches.hide_other_launches(monkeypatch)
    call, signals = launcher(count_signals, 1, start_method="fork"), list[int]()
    thread = threading.Thread(target=lambda: signals.extend(call(tmp_path)))
    thread.start()
    try:
        wait_until(lambda: (tmp_path / "works").exists() and launches.ask("stacks"))  # its agent listens, too
        for _ in range(5):
            assert call.why().startswith("no rank waits")
            [launch] = launches.ask("stacks")
            assert "count_signals" in {function for _, _, function in launch["ranks"][0]["frames"]}
    finally:
        (tmp_path / "enough").touch()
        thread.join()
    assert signals == [0]
