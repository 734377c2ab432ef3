"""Why ranks hang: the culprit and its line are named, whatever holds it up."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from mlaunch import LaunchError, launcher
from tests.contract.test_engine_calls import Threads
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


def hold_up(by: Callable[[], None]) -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        by()
    dist.all_reduce(torch.ones(1))


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
def test_who_holds_up_the_others(case: Callable[[], None]) -> None:
    run = launcher(cross if case is cross else hold_up, 3, grace_period=0.2).submit(case)
    said: list[str] = []

    def is_said() -> bool:
        said.append(run.why())
        return re.match(CASES[case], said[-1]) is not None

    try:
        wait_until(is_said)
    finally:
        assert run.cancel(), said[-1]


def test_ranks_of_two_machines(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")

    def read() -> None:
        try:
            raise ValueError
        except ValueError:
            (tmp_path / "go").read_text()

    ours = launcher(hold_up, 2, engine=Threads())
    thread = threading.Thread(target=lambda: ours(read))
    thread.start()
    said = rf"{LATE}rank 1 is in read_text {AT}, handling an exception"
    heard: list[str] = []

    def is_said() -> bool:
        heard.append(ours.why())  # of each machine's part, too, as they are all here
        return re.search(said, heard[-1]) is not None

    try:
        wait_until(is_said)
    except AssertionError:
        pytest.fail(heard[-1])
    finally:
        (tmp_path / "go").write_text("x")
        thread.join()


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
