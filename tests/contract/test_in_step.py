"""Whether ranks that stay can go on after a call that went wrong, and what becomes of those that cannot."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mlaunch import Held, LaunchError, LaunchTimeout, Ranks, RanksLost, launcher
from tests import launches
from tests.conftest import ROOT
from tests.contract.functions import caught, total, wait_in_vain
from tests.imported import IMPORTED
from tests.processes import alive, children, descendants, wait_gone, wait_until

LIMIT = 60.0  # seconds, of every wait
STAYED = "the ranks are in step and stay, with what they hold"
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("the_next_call_works")]  # most of these end their ranks


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks(n_gpus=2, grace_period=0.5) as opened:
        yield opened


def spin() -> None:
    while True:
        signal.sigtimedwait([], 0.01)


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


@contextlib.contextmanager
def intact(ranks: Ranks) -> Iterator[None]:
    """That the same processes go on with the same objects."""
    ranks.run(total)  # so that this module is imported: on a busy machine no deadline comes in the middle of that
    held = ranks.hold(lambda: [dist.get_rank()])
    before = ranks.run(lambda x: (os.getpid(), id(x)), held)
    yield
    assert ranks.run(lambda x: (os.getpid(), id(x)), held) == before
    assert ranks.run(total) == [2.0, 2.0]
    assert held.alive


@contextlib.contextmanager
def lost(ranks: Ranks) -> Iterator[None]:
    """That none of the processes is left, and that the next call gets fresh ones."""
    held = ranks.hold(lambda: [dist.get_rank()])
    before = ranks.run(os.getpid)
    yield
    wait_gone(before)
    assert not held.alive
    words = r"held value \d+ is lost, since the ranks that held it have ended"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the error has told of it
        with pytest.raises(ValueError, match=words):
            ranks.run(lambda x: x, held)
    assert not set(ranks.run(os.getpid)) & set(before)
    assert ranks.run(total) == [2.0, 2.0]


def fails_and_is_lost(ranks: Ranks, work: Callable[[], object]) -> None:
    with lost(ranks):
        error = caught(lambda: ranks.run(work))
        assert isinstance(error, ValueError)
        assert STAYED not in notes(error)


def interrupt(caller: int) -> None:
    """In a rank."""
    if dist.get_rank() == 0:
        os.kill(caller, signal.SIGINT)


# An exception


def fail() -> None:
    raise ValueError("no such luck")


def all_fail() -> None:
    fail()


def one_fails_and_the_other_returns() -> None:
    if dist.get_rank() == 1:
        fail()


def one_fails_and_the_other_works() -> None:
    if dist.get_rank() == 1:
        fail()
    spin()


def one_fails_after_an_operation() -> None:
    total()
    one_fails_and_the_other_works()


@pytest.mark.parametrize(
    "work", [all_fail, one_fails_and_the_other_returns, one_fails_and_the_other_works, one_fails_after_an_operation]
)
def test_an_exception_leaves_them_in_step(ranks: Ranks, work: Callable[[], None]) -> None:
    with intact(ranks):
        error = caught(lambda: ranks.run(work))
        assert isinstance(error, ValueError)
        assert isinstance(error.__cause__, LaunchError)
        assert STAYED in notes(error)
        assert ranks.last is not None
        assert any(row.end.startswith("raised") for row in ranks.last.ranks)


def one_fails_and_the_other_waits_for_it() -> None:
    wait_in_vain(1, "in vain")


def sum_in_a_new_group() -> float:
    value = torch.ones(1)
    dist.all_reduce(value, group=dist.new_group([0, 1]))
    return value.item()


def test_a_rank_that_waits_in_vain_is_out_of_step(ranks: Ranks) -> None:
    with lost(ranks):
        error = caught(lambda: ranks.run(one_fails_and_the_other_waits_for_it))
        assert isinstance(error, ValueError)
        assert "what they held is lost, and the next call starts fresh ones" in notes(error)
        told = f"{error.__cause__}\n{notes(error)}"
        assert told.count("rank 0 was in wait at functions.py:") == 1, told  # once: the report says it
        assert STAYED not in notes(error)


def test_operations_that_one_rank_alone_has_begun(ranks: Ranks) -> None:
    def work() -> None:
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            sys.left_here = work  # type: ignore[attr-defined]
            store.set("begun", "")
        store.wait(["begun"])
        fail()

    fails_and_is_lost(ranks, work)


def messages_to_one() -> list[Any]:
    return [dist.isend(torch.ones(3), 1)] if dist.get_rank() == 0 else []


def messages_both_ways() -> list[Any]:
    """As many on each rank."""
    return [dist.isend(torch.ones(3), 1 - dist.get_rank())]


def messages_that_are_awaited() -> list[Any]:
    return [dist.irecv(torch.ones(3), 1 - dist.get_rank())]


def messages_of_anybody() -> list[Any]:
    return [dist.irecv(torch.ones(3))]


def messages_at_once() -> list[Any]:
    return dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(3), 1 - dist.get_rank())])


def messages_below_torchs_functions() -> list[Any]:
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    return [backend.send([torch.ones(3)], 1 - dist.get_rank(), 0)]


def messages_of_another_group() -> list[Any]:
    return [dist.isend(torch.ones(3), 1 - dist.get_rank(), group=dist.new_group([0, 1]))]


@pytest.mark.parametrize(
    "begin",
    [
        messages_to_one,
        messages_both_ways,
        messages_that_are_awaited,
        messages_of_anybody,
        messages_at_once,
        messages_below_torchs_functions,
        messages_of_another_group,
    ],
)
def test_messages_that_a_failed_call_has_begun(ranks: Ranks, begin: Callable[[], list[Any]]) -> None:
    """The other end would take one for the next, or wait for it; equal numbers do not tell."""

    def work(begin: Callable[[], list[Any]]) -> None:
        sys.left_here = begin()  # type: ignore[attr-defined]
        dist.barrier()
        fail()

    def next_message() -> float:
        sent, found = torch.full((3,), 5.0), torch.zeros(3)
        begun = dist.isend(sent, 1 - dist.get_rank())
        dist.recv(found, 1 - dist.get_rank())
        begun.wait()
        return found.mean().item()

    with lost(ranks):
        assert STAYED not in notes(caught(lambda: ranks.run(work, begin)))
    assert ranks.submit(next_message).result(LIMIT) == [5.0, 5.0]


def test_messages_of_calls_before_are_no_reason(ranks: Ranks) -> None:
    """One that is on its way as a call begins is so when it has failed."""

    def begin() -> list[Any]:
        return [dist.isend(torch.ones(3), 1 - dist.get_rank())]

    def end(begun: list[Any]) -> float:
        found = torch.zeros(3)
        dist.recv(found, 1 - dist.get_rank())
        begun[0].wait()
        return found.mean().item()

    with intact(ranks):
        begun = ranks.hold(begin)
        assert STAYED in notes(caught(lambda: ranks.run(fail)))
        assert ranks.submit(end, begun).result(LIMIT) == [1.0, 1.0]


def test_a_group_that_one_rank_alone_has_made(ranks: Ranks) -> None:
    """torch counts groups to name them: the next would have two names."""

    def work() -> None:
        if dist.get_rank() == 0:
            dist.new_group([0], use_local_synchronization=True)
        fail()

    assert isinstance(caught(lambda: ranks.run(work)), ValueError)
    assert ranks.submit(sum_in_a_new_group).result(LIMIT) == [2.0, 2.0]


def test_a_group_that_one_rank_waits_for(ranks: Ranks) -> None:
    def work() -> None:
        if dist.get_rank() == 0:
            dist.new_group([0, 1])
        fail()

    assert isinstance(caught(lambda: ranks.run(work)), ValueError)
    assert ranks.submit(sum_in_a_new_group).result(LIMIT) == [2.0, 2.0]


def test_a_rank_that_is_called_back_while_it_makes_a_group(ranks: Ranks) -> None:
    """It has counted the group, which is all that is left of it."""

    def work() -> None:
        store = dist.distributed_c10d._get_default_store()

        def never_there(*_: Any, **__: Any) -> None:
            store.set("begun", "")
            while True:
                signal.pause()

        if dist.get_rank() == 0:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dist.distributed_c10d, "_new_process_group_helper", never_there)
                dist.new_group([0, 1])
        store.wait(["begun"])
        fail()

    fails_and_is_lost(ranks, work)
    assert ranks.submit(sum_in_a_new_group).result(LIMIT) == [2.0, 2.0]


def test_a_group_whose_member_never_came() -> None:
    def make() -> list[Any]:
        groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        return [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]

    def work(groups: list[Any]) -> None:
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 2:
            store.wait(["entered"])
            fail()
        for group in groups:
            begun = dist.all_reduce(torch.ones(1), group=group, async_op=True)
            store.set("entered" if group is groups[-1] and dist.get_rank() == 1 else "other", "1")
            begun.wait()

    with Ranks(n_gpus=3, grace_period=0.5) as ranks:
        groups = ranks.hold(make)
        ranks.run(lambda groups: [dist.all_reduce(torch.ones(1), group=group) for group in groups] and None, groups)
        error = caught(lambda: ranks.run(work, groups))
        assert isinstance(error, ValueError)
        assert "what they held is lost" in notes(error)
        assert ranks.run(total) == [3.0] * 3


def test_groups_that_all_have_made_are_no_reason(ranks: Ranks) -> None:
    def work() -> None:
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=group)
        dist.new_group([1])
        dist.barrier()  # else one may fail while the other is still making it
        fail()

    with intact(ranks):
        assert isinstance(caught(lambda: ranks.run(work)), ValueError)


def test_a_group_that_was_destroyed_is_no_reason(ranks: Ranks) -> None:
    def work() -> None:
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
        dist.barrier()  # else one may fail while the other is still making it
        fail()

    with intact(ranks):
        assert isinstance(caught(lambda: ranks.run(work)), ValueError)


def all_destroy() -> None:
    total()
    dist.destroy_process_group()


def one_destroys() -> None:
    total()
    dist.barrier()
    if dist.get_rank() == 1:
        dist.destroy_process_group()


def one_destroys_and_both_fail() -> None:
    one_destroys()
    fail()


def all_destroy_and_fail() -> None:
    all_destroy()
    fail()


@pytest.mark.parametrize("work", [all_destroy, one_destroys, all_destroy_and_fail])
def test_a_default_group_that_a_call_has_destroyed_is_made_anew(ranks: Ranks, work: Callable[[], None]) -> None:
    """As functions do that were written for torchrun; what the ranks hold stays."""
    for _ in range(2):
        with intact(ranks):
            held = ranks.hold(lambda: [3])
            with contextlib.suppress(ValueError):
                ranks.run(work)
            assert ranks.submit(total).result(LIMIT) == [2.0, 2.0]
            assert ranks.run(sum_in_a_new_group) == [2.0, 2.0]
            assert held.fetch() == [[3], [3]]
            error = caught(lambda: ranks.run(fail))
            assert STAYED in notes(error)


def test_a_default_group_that_one_rank_has_destroyed_before_another_begins_the_call(ranks: Ranks) -> None:
    pids, board = ranks.run(os.getpid), launches.board_of(ranks)
    assert board is not None
    os.kill(pids[1], signal.SIGSTOP)
    destroyed = ranks.submit(dist.destroy_process_group)
    wait_until(lambda: bool(board.apart))
    os.kill(pids[1], signal.SIGCONT)
    assert destroyed.result(LIMIT) == [None, None]
    assert ranks.submit(total).result(LIMIT) == [2.0, 2.0]
    assert ranks.run(os.getpid) == pids


def test_a_default_group_that_one_rank_has_destroyed_in_a_call_that_failed(ranks: Ranks) -> None:
    fails_and_is_lost(ranks, one_destroys_and_both_fail)


def test_a_default_group_that_cannot_be_made_anew(ranks: Ranks) -> None:
    def work() -> None:
        def refuse(*_: Any) -> None:
            raise ConnectionError("no way")

        launches.make_groups_by(refuse)
        dist.destroy_process_group()

    ranks.run(work)
    error = caught(lambda: ranks.run(total))
    assert "an earlier call on these ranks has destroyed the default process group" in str(error)
    assert "could not be made again: no way" in str(error)


def test_without_restart() -> None:
    with Ranks(n_gpus=2, grace_period=0.5, restart=False) as ranks:
        pids = ranks.run(os.getpid)
        error = caught(lambda: ranks.run(one_fails_and_the_other_waits_for_it))
        assert isinstance(error, ValueError)
        assert "what they held is lost, and no call starts others (restart=False)" in notes(error)
        for use in (ranks.run, ranks.submit):
            with pytest.raises(RanksLost, match=r"the ranks are gone: .*step"):
                use(total)
        wait_gone(pids)


def test_calls_that_wait_for_lost_ranks_run_on_fresh_ones(ranks: Ranks) -> None:
    """In their order, and before those that are made later; but not where they mean what the lost ones held."""
    held, seen = ranks.hold(list), []
    first = ranks.submit(one_fails_and_the_other_waits_for_it)
    queued = [ranks.submit(lambda x: x, number) for number in range(3)]
    meant_for_these = ranks.submit(len, held)
    for number, future in enumerate(queued):
        future.add_done_callback(lambda _, number=number: seen.append(number))  # type: ignore[misc]
    assert ranks.run(total) == [2.0, 2.0]
    assert seen == [0, 1, 2]
    assert [future.result(LIMIT) for future in queued] == [[0, 0], [1, 1], [2, 2]]
    assert isinstance(first.exception(LIMIT), ValueError)
    error = meant_for_these.exception(LIMIT)
    assert isinstance(error, RanksLost)
    assert "len() was not run, since its ranks are gone" in str(error)


def test_a_call_that_waits_for_ranks_that_die_runs_though_nobody_calls(ranks: Ranks) -> None:
    ranks.submit(os._exit, 3)
    assert ranks.submit(total).result(LIMIT) == [2.0, 2.0]


def test_calls_that_wait_for_lost_ranks_that_nobody_restarts() -> None:
    with Ranks(n_gpus=2, restart=False) as ranks:
        first, second = ranks.submit(os._exit, 3), ranks.submit(total)
        assert isinstance(first.exception(LIMIT), LaunchError)
        error = second.exception(LIMIT)
        assert isinstance(error, RanksLost)
        assert "total() was not run, since its ranks are gone" in str(error)


def test_calls_that_wait_for_lost_ranks_which_are_closed(tmp_path: Path) -> None:
    """One was cancelled, and nobody begins it."""
    ranks, gate = Ranks(n_gpus=2), str(tmp_path / "gate")
    first = ranks.submit(end_once, gate)
    second, third = ranks.submit(total), ranks.submit(total)
    assert second.cancel()
    closing = threading.Thread(target=ranks.close)
    closing.start()
    wait_until(lambda: launches.is_closing(ranks))
    Path(gate).touch()
    closing.join(LIMIT)
    assert not closing.is_alive()
    assert isinstance(first.exception(LIMIT), LaunchError)
    assert isinstance(third.exception(LIMIT), RanksLost)


def end_once(path: str) -> None:
    wait_for_file(path)
    os._exit(3)


def wait_for_file(path: str) -> None:
    wait_until(lambda: os.path.exists(path))


# What cannot travel


class Unreadable:
    def __reduce__(self) -> Any:
        return fail, ()


def test_arguments_that_cannot_be_unpickled(ranks: Ranks) -> None:
    with intact(ranks):
        error = caught(lambda: ranks.run(lambda x: x, Unreadable()))
        assert isinstance(error, ValueError)
        assert STAYED in notes(error)


def test_a_value_that_cannot_be_pickled(ranks: Ranks) -> None:
    with intact(ranks):
        error = caught(lambda: ranks.run(lambda: threading.Lock() if dist.get_rank() == 1 else 1))
        assert isinstance(error, LaunchError)
        assert "rank 1 of " in str(error)
        assert "returned a value that cannot be pickled" in str(error)
        assert STAYED in notes(error)


def test_a_value_that_cannot_be_unpickled_here(ranks: Ranks) -> None:
    with intact(ranks):
        error = caught(lambda: ranks.run(Unreadable))
        assert "cannot be unpickled here" in str(error)


begun, go_on = threading.Event(), threading.Event()  # here, in the caller


def wait_here() -> int:
    begun.set()
    assert go_on.wait(LIMIT)
    return 1


class Slow:
    def __reduce__(self) -> Any:
        return wait_here, ()


def test_other_calls_run_while_a_value_is_unpickled(ranks: Ranks) -> None:
    """That is code of the user's, which may wait for them."""
    for function in (Slow, lambda: (Slow(), bytes(100_000))):  # in an answer, and in a file
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(ranks.run, function)
            assert begun.wait(LIMIT)
            assert ranks.submit(int).result(LIMIT) == [0, 0]
            assert not slow.done()
            go_on.set()
            assert len(slow.result(LIMIT)) == 2
        begun.clear()
        go_on.clear()


class Error(ValueError):
    def __reduce__(self) -> Any:
        return wait_for_error, ()


def wait_for_error() -> Error:
    if not dist.is_initialized():  # a rank tries whether it comes back
        wait_here()
    return Error()


def fail_alone() -> None:
    try:
        wait_in_vain(1, "alone")
    except ValueError:
        raise Error from None


def test_fresh_ranks_run_while_an_error_of_lost_ones_is_unpickled(ranks: Ranks) -> None:
    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(ranks.run, fail_alone)
        assert begun.wait(LIMIT)
        assert ranks.submit(total).result(LIMIT) == [2.0, 2.0]
        assert not failed.done()
        go_on.set()
        error = failed.exception(LIMIT)
        assert isinstance(error, Error)
        assert "what they held is lost" in notes(error)
    begun.clear()
    go_on.clear()


class SlowStream(io.StringIO):
    """Is where the caller prints, and takes its time."""

    could_go_on = False

    def write(self, text: str) -> int:
        if "slow" in text:
            begun.set()
            self.could_go_on = go_on.wait(LIMIT)
        return len(text)


def test_a_slow_reader_of_output_holds_up_no_submit(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SlowStream()
    monkeypatch.setattr(sys, "stdout", stream)
    with ThreadPoolExecutor(1) as pool:
        printed = pool.submit(ranks.run, print, "slow")
        assert begun.wait(LIMIT)
        later = ranks.submit(total)
        assert ranks.stop()
        go_on.set()
        assert printed.result(LIMIT) == [None, None]
        assert later.result(LIMIT) == [2.0, 2.0]
    assert stream.could_go_on
    begun.clear()
    go_on.clear()


# A deadline


def test_a_deadline_of_a_loop() -> None:
    with Ranks(n_gpus=2, deadline=1) as ranks, intact(ranks):
        error = caught(lambda: ranks.run(spin))
        assert isinstance(error, LaunchTimeout)
        assert "did not finish within its deadline of 1 s; ranks 0-1 had not returned\n" in str(error)
        assert STAYED in notes(error)
        assert any("spin" in stack for stack in error.stacks.values())  # a busy machine may be late with the other


def one_waits_and_the_other_works() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    spin()


def test_a_deadline_in_an_operation() -> None:
    with Ranks(n_gpus=2, deadline=1, grace_period=0.3) as ranks, lost(ranks):
        error = caught(lambda: ranks.run(one_waits_and_the_other_works))
        assert isinstance(error, LaunchTimeout)
        assert "what they held is lost" in notes(error)


def test_a_deadline_is_of_one_call(ranks: Ranks) -> None:
    with intact(ranks):
        late = launcher(spin, deadline=0.2).options(ranks=ranks)
        assert isinstance(caught(late), LaunchTimeout)


def test_a_deadline_of_a_call_that_waits_for_another() -> None:
    """Nobody waits for either, so a thread of the launcher begins the second and keeps its deadline."""
    with Ranks(n_gpus=2, deadline=1) as ranks, intact(ranks):
        ranks.submit(total)
        late, told = ranks.submit(spin), threading.Event()
        late.add_done_callback(lambda _: told.set())
        assert told.wait(LIMIT)
        assert isinstance(late.exception(), LaunchTimeout)


def test_a_deadline_that_passes_as_the_values_come(ranks: Ranks) -> None:
    """Whichever is first; the next call is right. No rank is ended in an operation that the other never enters."""

    def who() -> int:
        return dist.get_rank()

    with intact(ranks):
        for hundredths in range(8):
            short = launcher(who, deadline=hundredths / 1e4 + 1e-4).options(ranks=ranks)
            with contextlib.suppress(LaunchTimeout):
                assert short() == [0, 1]
            assert ranks.run(total) == [2.0, 2.0]


def test_a_deadline_that_passes_in_an_operation_that_may_be_over(ranks: Ranks) -> None:
    """Where one rank is in it and the other never comes there, they are lost; the next call is right in any case."""
    for hundredths in range(8):
        short = launcher(total, deadline=hundredths / 1e4 + 1e-4).options(ranks=ranks)
        with contextlib.suppress(LaunchTimeout):
            assert short() == [2.0, 2.0]
        assert ranks.run(total) == [2.0, 2.0]


# Ctrl-C


def test_an_interrupt_of_a_loop(ranks: Ranks) -> None:
    def work(caller: int) -> None:
        interrupt(caller)
        spin()

    with intact(ranks):
        for _ in range(3):
            error = caught(lambda: ranks.run(work, os.getpid()))
            assert isinstance(error, KeyboardInterrupt)
            assert STAYED in notes(error)
            assert "work() was interrupted; rank" in notes(error)
            # The one that asked may not be back from that, and the other may not have come so far.
            assert re.search(r" in (spin|interrupt) at test_in_step\.py", notes(error))


def test_an_interrupt_of_an_operation(ranks: Ranks) -> None:
    def work(caller: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            begun = dist.all_reduce(torch.ones(1), async_op=True)
            store.set("entered", "1")
            begun.wait()
        store.wait(["entered"])
        os.kill(caller, signal.SIGINT)
        spin()

    with lost(ranks):
        error = caught(lambda: ranks.run(work, os.getpid()))
        assert isinstance(error, KeyboardInterrupt)
        assert "what they held is lost" in notes(error)


def test_a_second_interrupt_ends_them_at_once() -> None:
    """Whatever they do, and however long the grace period is."""

    def work(caller: int) -> None:
        interrupt(caller)
        try:
            spin()
        finally:
            interrupt(caller)
            signal.pause()
            spin()

    with Ranks(n_gpus=2, grace_period=1000) as ranks, lost(ranks):
        error = caught(lambda: ranks.run(work, os.getpid()))
        assert isinstance(error, KeyboardInterrupt)


# Python drops an interrupt in the callback of a weak reference with a warning; mlaunch raises it again.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_any_moment_of_short_calls(ranks: Ranks) -> None:
    """Each ends its call or comes too late for it; the ranks stay, and the next call is right."""
    chance, pids = random.Random(7), ranks.run(os.getpid)
    kept: list[Held] = []  # an interrupt while one is collected would be dropped by Python, with a warning
    calls: list[Callable[[], object]] = [
        lambda: ranks.run(int),
        lambda: kept.append(ranks.hold(list)),
        lambda: ranks.submit(int).result(LIMIT),
    ]
    before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        for number in range(150):
            with contextlib.suppress(KeyboardInterrupt):
                interrupted_after(chance.uniform(1e-6, 0.004), calls[number % 3])
            assert ranks.run(total) == [2.0, 2.0]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ranks.run(os.getpid) == pids


def interrupted_after(seconds: float, call: Callable[[], object]) -> None:
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_an_interrupt_in_operations_that_do_not_match() -> None:
    """Once one is back, the other is known to wait in vain, however long the grace period is."""

    def work(caller: int) -> None:
        if dist.get_rank() == 0:
            dist.distributed_c10d._get_default_store().wait(["entered"])
            interrupt(caller)
            spin()
        waiting = dist.all_reduce(torch.ones(3), async_op=True)
        dist.distributed_c10d._get_default_store().set("entered", "")
        waiting.wait()

    with Ranks(n_gpus=2, grace_period=1000) as ranks, lost(ranks):
        error = caught(lambda: ranks.run(work, os.getpid()))
        assert isinstance(error, KeyboardInterrupt)
        assert "rank 1 was" in notes(error)


def test_a_rank_that_begins_late_and_waits_in_vain() -> None:
    """When the others are asked where they are, it is not there yet."""

    class Late:
        def __reduce__(self) -> tuple[Callable[[], int], tuple[()]]:
            return begin_late, ()

    def work(_: int) -> None:
        if dist.get_rank() == 0:
            dist.distributed_c10d._get_default_store().wait(["late"])
            fail()
        dist.barrier()

    with Ranks(n_gpus=2, grace_period=1000) as ranks, lost(ranks):
        assert isinstance(caught(lambda: ranks.run(work, Late())), ValueError)


def begin_late() -> int:
    """Waits, on rank 1, until it has been called back, and begins all the same."""
    if dist.get_rank() == 1:
        with contextlib.suppress(KeyboardInterrupt):
            dist.distributed_c10d._get_default_store().set("late", "")
            spin()
    return 0


def test_a_call_that_swallows_the_interrupt(ranks: Ranks) -> None:
    """It has ended by itself: the interrupt is raised all the same."""

    def work(caller: int) -> int:
        try:
            interrupt(caller)
            spin()
        except KeyboardInterrupt:
            pass
        return 5

    with intact(ranks):
        assert isinstance(caught(lambda: ranks.run(work, os.getpid())), KeyboardInterrupt)


def test_a_call_that_will_not_end(ranks: Ranks) -> None:
    def work(caller: int) -> None:
        interrupt(caller)
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                spin()
                spin()

    with lost(ranks):
        assert isinstance(caught(lambda: ranks.run(work, os.getpid())), KeyboardInterrupt)


def test_an_interrupt_while_another_threads_call_runs(ranks: Ranks, tmp_path: Any) -> None:
    """It ends the call of the main thread, which has not begun."""

    def work(caller: int, directory: str) -> int:
        wait_for_file(f"{directory}/submitted")
        interrupt(caller)
        wait_for_file(f"{directory}/gate")
        return 6

    def call() -> object:
        (tmp_path / "submitted").touch()
        return ranks.run(total)

    with intact(ranks):
        first = ranks.submit(work, os.getpid(), str(tmp_path))
        assert isinstance(caught(call), KeyboardInterrupt)
        (tmp_path / "gate").touch()
        assert first.result(LIMIT) == [6, 6]


# A rank that ends


@pytest.mark.nightly("returns-os._exit", "returns-SIGKILL", "waits-sys.exit", "waits-success", "waits-SIGSEGV")
@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda: sys.exit(3), "exited with code 3"),
        (lambda: os._exit(4), "exited with code 4"),
        (lambda: sys.exit(0), "exited with code 0"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was killed by SIGSEGV"),
    ],
    ids=["sys.exit", "os._exit", "success", "SIGKILL", "SIGSEGV"],
)
@pytest.mark.parametrize("other", ["returns", "waits"])
def test_a_rank_ends_during_a_call(ranks: Ranks, how: Callable[[], object], words: str, other: str) -> None:
    def work() -> None:
        if dist.get_rank() == 1:
            how()
        if other == "waits":
            dist.barrier()

    with lost(ranks):
        error = caught(lambda: ranks.run(work))
        assert isinstance(error, LaunchError | RanksLost), repr(error)
        assert words in f"{error}{notes(error)}"
        assert "rank 1" in str(error)
        assert ranks.last is not None
        assert words in ranks.last.ranks[1].end


def test_a_rank_is_killed_between_calls(ranks: Ranks) -> None:
    pids = ranks.run(os.getpid)
    os.kill(pids[1], signal.SIGKILL)
    wait_gone(pids)
    for thread in threading.enumerate():
        if thread.name == "mlaunch-ranks":
            thread.join(LIMIT)
    with pytest.warns(RuntimeWarning, match="the ranks were lost between calls: rank 1.* was killed by SIGKILL"):
        assert ranks.run(total) == [2.0, 2.0]


def test_a_rank_is_killed_between_calls_without_restart() -> None:
    with Ranks(n_gpus=2, restart=False) as ranks:
        pids = ranks.run(os.getpid)
        os.kill(pids[0], signal.SIGKILL)
        wait_gone(pids)
        with pytest.raises((RanksLost, LaunchError), match=r"rank 0.* was killed by SIGKILL"):
            ranks.run(total)


def test_a_rank_that_is_stopped_between_calls() -> None:
    with Ranks(n_gpus=2, deadline=0.3, grace_period=0.2) as ranks:
        pids = ranks.run(os.getpid)
        os.kill(pids[1], signal.SIGSTOP)
        assert isinstance(caught(lambda: ranks.run(total)), LaunchTimeout)
        wait_gone(pids)
        assert ranks.run(lambda: 1) == [1, 1]


# Those above them


def test_the_agent_is_killed(ranks: Ranks) -> None:
    with lost(ranks):
        pids = ranks.run(os.getpid)
        [agent] = set(ranks.run(os.getppid))
        assert isinstance(caught(lambda: ranks.run(kill_parent)), LaunchError)
        wait_gone([agent, *pids])


def kill_parent() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    spin()


def test_the_agent_is_killed_between_calls(ranks: Ranks) -> None:
    pids = ranks.run(os.getpid)
    [agent] = set(ranks.run(os.getppid))
    os.kill(agent, signal.SIGKILL)
    wait_gone([agent, *pids])
    with contextlib.suppress(LaunchError, RanksLost):
        ranks.submit(total).result(LIMIT)
    assert ranks.run(total) == [2.0, 2.0]


def test_the_agent_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    launches.be_patient(monkeypatch, "reaction", 0.5)
    with Ranks(n_gpus=2, grace_period=0.2) as ranks:
        pids = ranks.run(os.getpid)
        [agent] = set(ranks.run(os.getppid))
        os.kill(agent, signal.SIGSTOP)
        # A call with a deadline needs it no more than one without.
        assert launcher(total, deadline=LIMIT).options(ranks=ranks)() == [2.0, 2.0]
        assert isinstance(caught(launcher(spin, deadline=0.5).options(ranks=ranks)), LaunchTimeout)
        wait_gone([agent, *pids])
        assert ranks.run(total) == [2.0, 2.0]


def test_closing_those_whose_agent_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    launches.be_patient(monkeypatch, "reaction", 0.5)
    with Ranks(n_gpus=2, grace_period=0.2) as ranks:
        pids = ranks.run(os.getpid)
        [agent] = set(ranks.run(os.getppid))
        os.kill(agent, signal.SIGSTOP)
    wait_gone([agent, *pids])


def test_the_fork_server_is_killed() -> None:
    ranks = Ranks(n_gpus=2, start_method="spawn")
    pids = ranks.run(os.getpid)
    [agent] = set(ranks.run(os.getppid))
    [server] = [pid for pid in children(os.getpid()) if agent in descendants(pid)]
    os.kill(server, signal.SIGKILL)
    wait_gone([server, agent, *pids])
    for thread in threading.enumerate():
        if thread.name == "mlaunch-ranks":
            thread.join(LIMIT)
    with pytest.warns(RuntimeWarning, match="the ranks were lost between calls: the fork server.*SIGKILL"):
        assert ranks.run(total) == [2.0, 2.0]
    ranks.close()


SCRIPT = """
import os, signal, sys
from mlaunch import Ranks
ranks = Ranks(n_gpus=2)
held = ranks.hold(bytearray, 1000)
print("ready", flush=True)
if sys.argv[1] == "running":
    ranks.run(signal.pause)
sys.stdin.read()
"""


@pytest.mark.parametrize("when", ["idle", "running"])
@pytest.mark.parametrize("victim", ["caller", "fork server"])
def test_no_orphans(when: str, victim: str) -> None:
    with subprocess.Popen(
        [IMPORTED, "-c", SCRIPT, when],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        [server] = descendants(process.pid)[:1]
        family = descendants(process.pid)
        assert len(family) == 4  # fork server, agent, two ranks
        os.kill({"caller": process.pid, "fork server": server}[victim], signal.SIGKILL)
        wait_gone(family)
        process.stdin.close()
        process.wait(LIMIT)
    assert not any(map(alive, family))
