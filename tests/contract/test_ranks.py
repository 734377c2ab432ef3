"""Ranks that stay: their calls, the futures of these, what they print, and who may use them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mlaunch
from mlaunch import LaunchError, Ranks, launcher, progress
from tests import builds, launches
from tests.conftest import OURS
from tests.contract.functions import Model, decorated, error_of, total
from tests.launches import Phase, board_here
from tests.processes import alive, said_in_fork, wait_gone, wait_until

LIMIT = 60.0  # seconds, of every wait
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks(n_gpus=2) as opened:
        yield opened


def pids_of(ranks: Ranks) -> list[int]:
    return ranks.run(os.getpid)


def wait_for_file(path: str) -> None:
    """In a rank: until a file is there."""
    wait_until(lambda: os.path.exists(path))


# Calls


def test_values_come_by_rank_and_the_processes_stay(ranks: Ranks) -> None:
    assert ranks.run(lambda x, *, y: (dist.get_rank(), x, y), 1, y=2) == [(0, 1, 2), (1, 1, 2)]
    first = pids_of(ranks)
    assert ranks.run(total) == [2.0, 2.0]
    assert pids_of(ranks) == first
    assert len({os.getpid(), *first}) == 3


def test_state_that_a_call_leaves_is_there_in_the_next(ranks: Ranks) -> None:
    def leave(value: int) -> None:
        sys.left_here = value + dist.get_rank()  # type: ignore[attr-defined]

    ranks.run(leave, 5)
    assert ranks.run(lambda: sys.left_here) == [5, 6]  # type: ignore[attr-defined]


def test_decorated_functions_run_as_what_they_wrap(ranks: Ranks) -> None:
    pids = pids_of(ranks)
    assert [value for value, _ in ranks.run(decorated, 10)] == [10, 11]
    of_class = MethodType(decorated, 10)  # what a class method of Python 3.13 is
    assert [value for value, _ in ranks.run(of_class)] == [10, 11]
    train = launcher(n_gpus=1)(lambda x: (x, os.getpid()))
    assert ranks.run(train, 0.1) == [(0.1, pid) for pid in pids]
    assert train.options(ranks=ranks)(0.2) == [(0.2, pid) for pid in pids]
    assert train.last is not None
    assert [row.pid for row in train.last.ranks] == pids
    assert ranks.submit(train, 0.3).result(LIMIT) == [(0.3, pid) for pid in pids]


def test_methods_run_with_their_instance(ranks: Ranks) -> None:
    model = Model(1)
    assert ranks.run(model.fit, 2) == [7, 7]
    assert ranks.run(Model.fit, model, 2, twice=True) == [14, 14]
    assert model.fit.options(ranks=ranks)(3) == [10, 10]
    assert ranks.run(Model.of_class) == ["Model", "Model"]
    assert ranks.run(model.__class__.static) == ["static", "static"]


def test_a_call_of_a_wrong_signature_is_refused_before_it_is_sent(ranks: Ranks) -> None:
    with pytest.raises(TypeError, match=r"missing a required argument: 'x'|missing 1 required"):
        ranks.run(lambda x: x)
    assert ranks.last is None


def test_arguments_that_cannot_be_pickled_are_named(ranks: Ranks) -> None:
    with pytest.raises(TypeError, match=r"argument 0 of .*lock.*cannot be pickled"):
        ranks.run(lambda x: x, threading.Lock())
    assert ranks.run(lambda: 1) == [1, 1]


def test_a_seed_counts_from_the_start() -> None:
    with Ranks(n_gpus=2, seed="per-rank:3") as ranks:
        drawn = [ranks.run(lambda: torch.rand(1).item()) for _ in range(2)]
    assert len({value for values in drawn for value in values}) == 4
    assert drawn[0] == launcher(lambda: torch.rand(1).item()).options(n_gpus=2, seed="per-rank:3")()


@pytest.mark.slow
def test_values_of_earlier_calls_stay_right_while_later_ones_write(ranks: Ranks) -> None:
    def make(number: int) -> torch.Tensor:
        return torch.full((200_000,), float(10 * number + dist.get_rank()))

    kept = [ranks.run(make, number) for number in range(20)]
    futures = [ranks.submit(make, number) for number in range(20)]
    for found in (kept, [future.result(LIMIT) for future in futures]):
        for number, values in enumerate(found):
            for rank, value in enumerate(values):
                assert bool((value == 10 * number + rank).all())
    kept[0][0].fill_(-1.0)  # it is the caller's own
    assert bool((kept[1][0] == 10).all())
    assert ranks.run(lambda: 1) == [1, 1]


def test_arguments_of_a_call_are_not_seen_by_others(ranks: Ranks) -> None:
    """Each rank may write to what it was given."""
    given = torch.zeros(100_000)

    def write(x: torch.Tensor) -> float:
        x += 1 + dist.get_rank()
        dist.barrier()
        return float(x.mean())

    assert ranks.run(write, given) == [1.0, 2.0]
    assert ranks.run(write, given) == [1.0, 2.0]
    assert float(given.sum()) == 0


def test_arguments_of_a_call_are_let_go_with_it(ranks: Ranks) -> None:
    """Else a rank that stays would have one file more with each call."""

    def files(given: torch.Tensor) -> int:
        assert len(given) == 100_000
        return len(os.listdir("/proc/self/fd"))

    counted = [ranks.run(files, torch.zeros(100_000)) for _ in range(3)]
    assert counted[1] == counted[2]


# Futures


def test_calls_run_in_the_order_in_which_they_were_submitted(ranks: Ranks) -> None:
    def note(number: int) -> list[int]:
        seen = vars(sys).setdefault("numbers", [])
        seen.append(number)
        return list(seen)

    futures = [ranks.submit(note, number) for number in range(10)]
    assert ranks.run(note, 10) == [list(range(11))] * 2
    assert all(future.done() for future in futures)
    assert futures[4].result() == [list(range(5))] * 2


def test_futures_are_those_of_concurrent_futures(ranks: Ranks) -> None:
    futures = [ranks.submit(lambda x: x + dist.get_rank(), number) for number in range(4)]
    assert all(isinstance(future, Future) for future in futures)
    done, waiting = concurrent.futures.wait(futures, LIMIT)
    assert done == set(futures)
    assert not waiting
    found = [future.result() for future in concurrent.futures.as_completed(futures, LIMIT)]
    assert sorted(found) == [[number, number + 1] for number in range(4)]
    assert futures[0].exception() is None


def test_a_future_of_a_call_that_raises(ranks: Ranks) -> None:
    def fail() -> None:
        raise ValueError("no such luck")

    future = ranks.submit(fail)
    error = future.exception(LIMIT)
    assert isinstance(error, ValueError)
    assert any("the ranks are in step and stay" in note for note in error.__notes__)
    assert future.report is not None
    assert any(row.end.startswith("raised") for row in future.report.ranks)  # the other may have been called back
    assert ranks.submit(lambda: 1).result(LIMIT) == [1, 1]


def test_futures_can_be_awaited(ranks: Ranks) -> None:
    async def work() -> list[Any]:
        first = asyncio.wrap_future(ranks.submit(dist.get_rank))
        second = asyncio.wrap_future(ranks.submit(lambda: -dist.get_rank()))
        return await asyncio.wait_for(asyncio.gather(first, second), LIMIT)

    assert asyncio.run(work()) == [[0, 1], [0, -1]]


def test_a_queued_call_can_be_cancelled(ranks: Ranks, tmp_path: Path) -> None:
    gate, trace = str(tmp_path / "gate"), tmp_path / "trace"
    first = ranks.submit(wait_for_file, gate)
    second = ranks.submit(Path.touch, trace)
    third = ranks.submit(lambda: 3)
    assert second.cancel()
    assert not first.cancel()  # it runs
    Path(gate).touch()
    assert third.result(LIMIT) == [3, 3]
    assert first.result(LIMIT) == [None, None]
    with pytest.raises(CancelledError):
        second.result(LIMIT)
    assert not trace.exists()


def test_a_callback_may_call(ranks: Ranks) -> None:
    found: list[Any] = []
    over = threading.Event()

    def go_on(future: Future[Any]) -> None:
        found.append(future.result())
        found.append(ranks.run(lambda: "of the callback"))
        over.set()

    ranks.submit(lambda: 1).add_done_callback(go_on)
    assert over.wait(LIMIT)
    assert found == [[1, 1], ["of the callback"] * 2]


def test_a_callback_of_a_call_that_the_main_thread_drives_may_call(ranks: Ranks, tmp_path: Path) -> None:
    found: list[Any] = []
    gate = str(tmp_path / "gate")
    first = ranks.submit(wait_for_file, gate)
    first.add_done_callback(lambda _: found.append(ranks.run(lambda: 2)))
    threading.Timer(0, Path(gate).touch).start()
    assert ranks.run(lambda: 3) == [3, 3]
    first.result(LIMIT)
    assert ranks.run(lambda: 4) == [4, 4]
    assert found == [[2, 2]]


def test_a_callback_may_close(tmp_path: Path) -> None:
    ranks = Ranks(n_gpus=2)
    closed = threading.Event()
    gate = str(tmp_path / "gate")
    future = ranks.submit(wait_for_file, gate)

    def close(_: object) -> None:
        ranks.close()
        closed.set()

    future.add_done_callback(close)
    Path(gate).touch()
    assert closed.wait(LIMIT)
    ranks.close()
    with pytest.raises(RuntimeError, match="these ranks were closed"):
        ranks.run(total)


def test_a_callback_that_raises_harms_nobody(ranks: Ranks) -> None:
    future = ranks.submit(lambda: 1)
    future.add_done_callback(lambda _: 1 / 0)
    assert future.result(LIMIT) == [1, 1]
    assert ranks.run(lambda: 2) == [2, 2]


def test_leaving_the_block_waits_for_what_was_submitted() -> None:
    with Ranks(n_gpus=2) as ranks:
        futures = [ranks.submit(lambda x: x, number) for number in range(5)]
    assert [future.result(0) for future in futures] == [[number] * 2 for number in range(5)]


def test_close_can_cancel_what_has_not_begun(tmp_path: Path) -> None:
    """As an executor's shutdown does; what runs is waited for."""
    gate = tmp_path / "gate"
    ranks = Ranks(n_gpus=1)
    running, queued = ranks.submit(wait_for_file, str(gate)), ranks.submit(lambda: 1)
    queued.add_done_callback(lambda _: gate.touch())
    ranks.close(cancel_futures=True)
    assert queued.cancelled()
    assert running.result(0) == [None]


def test_terminate_ends_what_runs(tmp_path: Path) -> None:
    ranks = Ranks(n_gpus=2, grace_period=0.1)
    running = ranks.submit(wait_for_file, str(tmp_path / "never"))
    queued = ranks.submit(lambda: 1)
    ranks.terminate()
    assert queued.cancelled()
    with pytest.raises(mlaunch.RanksLost, match=r"wait_for_file.* was ended: they were closed"):
        running.result(LIMIT)


# Who uses them


def test_threads_share_them(ranks: Ranks) -> None:
    def call(number: int) -> Any:
        return ranks.run(lambda x: (x, dist.get_rank()), number)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(call, range(40), timeout=LIMIT))
    assert found == [[(number, 0), (number, 1)] for number in range(40)]


@pytest.mark.slow
def test_two_at_once(ranks: Ranks, tmp_path: Path) -> None:
    """Each goes on while the other's call waits for it."""
    with Ranks(n_gpus=1) as others:
        gate = str(tmp_path / "gate")
        waiting = ranks.submit(wait_for_file, gate)
        assert others.run(Path.touch, Path(gate)) == [None]
        assert waiting.result(LIMIT) == [None, None]
        assert not set(pids_of(ranks)) & set(pids_of(others))
        assert launcher(total, 2)() == [2.0, 2.0]  # and launches beside them


def test_reports(ranks: Ranks) -> None:
    assert ranks.last is None
    assert ranks.history == ()
    futures = [ranks.submit(lambda x: x, number) for number in range(2)]
    ranks.run(total)
    reports = ranks.history
    assert len(reports) == 3
    assert reports[0] is futures[0].report
    assert reports[1] is futures[1].report
    assert ranks.last is reports[2]
    assert "total()" in str(ranks.last).splitlines()[0]
    assert [row.rank for row in ranks.last.ranks] == [0, 1]
    assert [row.pid for row in ranks.last.ranks] == pids_of(ranks)


def test_after_close(ranks: Ranks) -> None:
    pids = pids_of(ranks)
    ranks.close()
    ranks.close()
    assert repr(ranks).endswith("closed>")
    for use in (ranks.run, ranks.submit, ranks.hold):
        with pytest.raises(RuntimeError, match="these ranks were closed"):
            use(total)
    wait_gone(pids)


def test_ranks_that_nobody_refers_to_end() -> None:
    ranks = Ranks(n_gpus=2)
    pids = pids_of(ranks)
    del ranks
    wait_gone(pids)
    for thread in threading.enumerate():
        if thread.name == "mlaunch-ranks":
            thread.join(LIMIT)


def test_a_submitted_call_ends_though_nobody_refers_to_the_ranks() -> None:
    future = Ranks(n_gpus=2).submit(os.getpid)
    pids = future.result(LIMIT)
    wait_gone(pids)
    for thread in threading.enumerate():
        if thread.name == "mlaunch-ranks":
            thread.join(LIMIT)


def test_a_fork_of_the_caller_has_no_right_to_them(ranks: Ranks) -> None:
    def use() -> str:
        error = error_of(lambda: ranks.run(total))
        ranks.close()
        return error

    first = pids_of(ranks)
    said = said_in_fork(use)
    assert said == f"RuntimeError: these ranks belong to process {os.getpid()}; this process is a fork of it"
    assert pids_of(ranks) == first


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"world_size": 4}, "ranks that stay are called by one process, which starts them"),
        ({"world_size": 4, "rank_start": 2}, "rank_start=2"),
        ({"max_restarts": 1}, "Ranks does not take max_restarts"),
        ({"keep": 5}, "Ranks does not take keep"),
        ({"n_gpus": 0}, "n_gpus"),
        ({"idle": 3}, "idle"),
        ({"idle_timeout": "3"}, "idle_timeout='3': allowed: a number of seconds"),
        ({"idle_timeout": -1}, "idle_timeout=-1: allowed: seconds, more than 0, or None"),
    ],
)
def test_wrong_options(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        Ranks(**{"n_gpus": 2, **wrong})
    assert frames_of(caught.value) == ["__init__"]


def frames_of(error: BaseException) -> list[str]:
    """The functions of the package that the traceback shows."""
    shown = [entry.f_code for entry, _ in traceback.walk_tb(error.__traceback__)]
    return [code.co_name for code in shown if code.co_filename.startswith(OURS)]


@builds.silent
def test_only_ranks_that_print_have_files(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(int)
    before = sorted(os.listdir("/proc/self/fd"))
    train = launcher(lambda text: print(text) if text and dist.get_rank() == 1 else 0, n_gpus=2, log_dir=tmp_path)
    train = train.options(ranks=ranks)
    assert [train("") for _ in range(3)] == [[0, 0]] * 3
    assert not list(tmp_path.iterdir())
    assert train.last is not None
    assert train.last.log_dir is None
    train("a line")
    (printed,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert printed.read_text() == "a line\n"
    assert train.last.log_dir == str(printed.parents[2])
    train("")
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_values_of_all_sizes_at_once(ranks: Ranks) -> None:
    """A small one comes from its rank itself, a large one by way of the agent."""

    def make(number: int) -> bytes:
        return bytes([number]) * (1_000_000 if (number + dist.get_rank()) % 3 == 0 else 10)

    kept = [ranks.run(make, number) for number in range(20)]
    for number, values in enumerate(kept):
        assert [set(value) for value in values] == [{number}, {number}]
        assert [len(value) for value in values] == [1_000_000 if (number + rank) % 3 == 0 else 10 for rank in (0, 1)]


def test_short_calls_do_not_wake_the_agent(ranks: Ranks) -> None:
    [agent] = set(ranks.run(os.getppid))
    os.kill(agent, signal.SIGSTOP)
    try:
        assert [ranks.run(total) for _ in range(10)] == [[2.0, 2.0]] * 10
    finally:
        os.kill(agent, signal.SIGCONT)
    with pytest.raises(ValueError, match="no such luck"):
        ranks.run(raise_error)
    assert ranks.run(total) == [2.0, 2.0]


def raise_error() -> None:
    raise ValueError("no such luck")


def test_errors_point_at_the_callers_line(ranks: Ranks) -> None:
    def fail() -> None:
        raise ValueError("no such luck")

    for call in (lambda: ranks.run(fail), lambda: ranks.run(fail, 1), lambda: ranks.run(fail, threading.Lock())):
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        assert frames_of(caught.value) == ["run"]
    for use in (ranks.submit, ranks.hold):
        with pytest.raises(TypeError, match="takes 0 positional arguments") as wrong:
            use(fail, 1)
        assert frames_of(wrong.value) == [use.__name__]


def test_output_of_ranks_comes_as_they_were_started(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the function's own options say of it."""
    train = launcher(lambda: print("printed"), n_gpus=2, output="raw")
    with Ranks(n_gpus=2) as fresh:  # no record of whose start has been heard yet
        assert train.options(ranks=fresh)() == [None, None]
    assert train.options(ranks=ranks)() == [None, None]
    # On a busy machine one rank's line may come so late that it is not merged with the other's.
    assert re.fullmatch(r"((\[0-1\] printed\n)|(\[[01]\] printed\n){2}){2}", capsys.readouterr().out)


@pytest.mark.slow
def test_an_interrupt_while_a_call_is_submitted(ranks: Ranks) -> None:
    """Nobody would have its future: it ends, and is no burden to the next."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's own ends the session
    try:
        with pytest.raises(KeyboardInterrupt), interrupted_as_it_is_queued():
            ranks.submit(signal.pause)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ranks.run(total) == [2.0, 2.0]


@contextlib.contextmanager
def interrupted_as_it_is_queued() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        launches.once_calls_are_queued(patch, lambda: os.kill(os.getpid(), signal.SIGINT))
        yield


def test_a_progress_bar_belongs_to_its_call(ranks: Ranks) -> None:
    def count() -> bytes:
        for _ in mlaunch.progress(range(3), "epochs"):
            pass
        return bytes(large)

    large = 100_000  # so that, as at a terminal, more than small values is heard of the call
    ranks.run(count)
    assert any("epochs" in line for line in launches.status_lines(ranks))
    ranks.run(bytes, large)
    assert not any("epochs" in line for line in launches.status_lines(ranks))


@pytest.mark.parametrize("last", [0, 1])
def test_the_last_of_a_large_and_a_small_value(ranks: Ranks, last: int) -> None:
    """The small one wakes the caller, the large one its agent, whichever comes last."""

    def answer(last: int) -> bytes:
        rank, board = dist.get_rank(), board_here()
        total()  # by now both have begun
        if rank == last and board is not None:
            wait_until(lambda: board[1 - rank] is Phase.IDLE)
        return bytes(1 + rank * 100_000)

    assert [len(value) for value in ranks.run(answer, last)] == [1, 100_001]
    assert ranks.run(total) == [2.0, 2.0]
    assert [one.returned for one in ranks.history[0].ranks] > [1, 100_001]


def test_a_memory_that_is_not_known_is_not_said(ranks: Ranks) -> None:
    ranks.run(total)
    assert ranks.last is not None
    assert " 0 B" not in str(ranks.last)


def test_a_world_of_their_own_size_is_one_machine() -> None:
    with Ranks(n_gpus=2, world_size=2) as ranks:
        assert ranks.run(total) == [2.0, 2.0]


def test_a_rank_has_none_of_its_own(ranks: Ranks) -> None:
    said = launcher(lambda: error_of(lambda: Ranks(n_gpus=1)), 1)()
    assert said[0].startswith("RuntimeError: Ranks() is called in rank 0 of ")
    assert "give join=False" in said[0]
    assert ranks.run(lambda: error_of(lambda: Ranks(n_gpus=1)))[0].startswith("RuntimeError: Ranks()")


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_start_methods(start_method: str) -> None:
    with Ranks(n_gpus=2, start_method=start_method) as ranks:
        pids = pids_of(ranks)
        assert ranks.run(total) == [2.0, 2.0]
        assert pids_of(ranks) == pids
    assert not any(map(alive, pids))


def test_repr(ranks: Ranks, tmp_path: Path) -> None:
    assert repr(ranks) == "<Ranks: 2 on cpu, idle>"
    future = ranks.submit(wait_for_file, str(tmp_path / "gate"))
    assert repr(ranks) == "<Ranks: 2 on cpu, running>"
    (tmp_path / "gate").touch()
    future.result(LIMIT)
    assert (ranks.world_size, ranks.devices) == (2, ("cpu", "cpu"))


# The end of those who are not used


def test_idle_ranks_end_and_fresh_ones_are_started() -> None:
    with Ranks(n_gpus=2, idle_timeout=0.05) as ranks:
        pids = pids_of(ranks)
        wait_gone(pids)
        assert repr(ranks).endswith("gone>")
        assert not set(pids_of(ranks)) & set(pids)


def test_idle_time_counts_from_the_end_of_a_call(ranks: Ranks) -> None:
    begun = time.monotonic()
    ranks.run(total)
    assert launches.idle_since(ranks) > begun


def test_ranks_with_a_shorter_time_to_stay_leave_then() -> None:
    with Ranks(n_gpus=2, idle_timeout=3600.0) as ranks:
        pids = pids_of(ranks)
        ranks.stay(0.05)
        wait_gone(pids, LIMIT)


def test_idle_ranks_end_by_design() -> None:
    """So it is nothing that ``restart=False`` minds."""
    with Ranks(n_gpus=2, idle_timeout=0.05, restart=False) as ranks:
        wait_gone(pids_of(ranks))
        assert ranks.run(total) == [2.0, 2.0]


STAYING = """
import os
from mlaunch import Ranks

ranks, others = Ranks(n_gpus=2), Ranks(n_gpus=1)
print(*ranks.run(os.getpid), *others.run(os.getpid))
"""


@pytest.mark.parametrize("end", ["die", "idle"])
def test_ranks_that_are_started_again_have_the_surroundings_of_the_first(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that is made elsewhere finds them as before."""

    def surroundings() -> tuple[str, str | None, bool]:
        return os.getcwd(), os.environ.get("STARTED"), "/nowhere" in sys.path

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STARTED", "first")
    with Ranks(n_gpus=1, idle_timeout=0.05 if end == "idle" else None) as ranks:
        [(pid, *first)] = ranks.run(lambda: (os.getpid(), *surroundings()))
        monkeypatch.chdir("/")
        monkeypatch.setenv("STARTED", "later")
        monkeypatch.setattr(sys, "path", [*sys.path, "/nowhere"])
        if end == "die":
            with pytest.raises(LaunchError):
                ranks.run(os._exit, 3)
        wait_gone([pid])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the error has told
            [(again, *later)] = ranks.run(lambda: (os.getpid(), *surroundings()))
        assert again != pid
        assert later == first == [str(tmp_path), "first", False]


LATE = """
from mlaunch import Ranks

class Saves:
    def __del__(self):
        try:
            self.ranks.run(int)
        except RuntimeError as error:
            print(error)

saves = Saves()
saves.ranks = Ranks(n_gpus=1)
print(saves.ranks.run(int))
"""


def test_a_call_after_the_exit_handlers_is_refused(run_script) -> None:  # type: ignore[no-untyped-def]
    done = run_script(LATE, fresh=True)  # the forks of tests end without taking modules apart
    refusal = "the interpreter is ending, and has ended its ranks; call them before that"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"[0]\n{refusal}\n", "")


def test_the_end_of_the_interpreter_leaves_nothing(run_script) -> None:  # type: ignore[no-untyped-def]
    done = run_script(STAYING)
    assert (done.returncode, done.stderr) == (0, "")
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3
    assert not any(map(alive, pids))


# Output


def test_output_belongs_to_its_call(ranks: Ranks, capsys: Capture) -> None:
    for number in range(3):
        ranks.run(lambda number: print(f"call {number} of {dist.get_rank()}"), number)
        shown = capsys.readouterr().out
        assert sorted(shown.splitlines()) == [f"[0] call {number} of 0", f"[1] call {number} of 1"]


def test_a_line_without_its_end_does_not_wait_for_the_next_call(ranks: Ranks, capsys: Capture) -> None:
    ranks.run(lambda: print("half", end="") if dist.get_rank() == 0 else None)
    assert capsys.readouterr().out.strip() == "[0] half"
    ranks.run(lambda: print("whole") if dist.get_rank() == 0 else None)
    assert capsys.readouterr().out == "[0] whole\n"


def test_a_directory_for_each_call(tmp_path: Path) -> None:
    with Ranks(n_gpus=2, log_dir=str(tmp_path)) as ranks:
        for number in range(3):
            ranks.run(lambda number: print(f"call {number}"), number)
        launcher(lambda: print("decorated")).options(ranks=ranks)()
    directories = sorted(tmp_path.iterdir())
    assert len(directories) == 3
    for number, directory in enumerate(sorted(directories, key=lambda path: path.stat().st_ctime_ns)):
        found = "".join(path.read_text() for path in directory.rglob("*") if path.is_file() and "0" in path.parts[-2])
        assert re.search(rf"call {number}\b", found), (directory, found)


def test_output_of_ranks_between_calls_is_shown(ranks: Ranks, tmp_path: Path, capfd: Capture) -> None:
    gate, shown = tmp_path / "gate", tmp_path / "shown"

    def begin() -> None:
        def later() -> None:
            wait_for_file(str(gate))
            print(f"between of {dist.get_rank()}")
            Path(f"{shown}{dist.get_rank()}").touch()

        threading.Thread(target=later, daemon=True).start()

    ranks.run(begin)
    gate.touch()
    for rank in range(2):
        wait_until(Path(f"{shown}{rank}").exists)
    ranks.close()
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] between of 0", "[1] between of 1"]


@pytest.mark.slow
def test_a_flood_between_calls_blocks_no_call(tmp_path: Path, capfd: Capture) -> None:
    stop = tmp_path / "stop"

    def begin() -> None:
        def flood() -> None:
            while not stop.exists():
                print("x" * 1000)
            sys.stdout.flush()

        threading.Thread(target=flood, daemon=True).start()

    with Ranks(n_gpus=2) as ranks:
        ranks.run(begin)
        for number in range(20):
            assert ranks.run(lambda x: x, number) == [number] * 2
        stop.touch()
        capfd.readouterr()


def test_progress_is_the_calls_own(ranks: Ranks) -> None:
    def loop() -> int:
        return sum(progress(range(5)))

    assert ranks.run(loop) == [10, 10]
    assert ranks.run(loop) == [10, 10]


@builds.silent
def test_calls_are_numbered_only_beside_others_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Not beside ranks that wait for their next call."""
    train = launcher(print, n_gpus=1)
    with Ranks(n_gpus=1) as ranks:
        ranks.run(print, "on ranks that stay")
        train("on its own")
        ranks.run(print, "again")
        train("again")
    assert capsys.readouterr().out.splitlines() == [
        "[0] on ranks that stay", "[0] on its own", "[0] again", "[0] again"
    ]  # fmt: skip


def test_a_group_that_a_call_has_destroyed_leaves_nothing(ranks: Ranks) -> None:
    """The store lives as long as the ranks, and each call may destroy one; nor torch's hooks, each around another."""

    def keys() -> tuple[int, int]:
        store: Any = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        dist.barrier()
        return int(store.num_keys()), id(sys.excepthook)

    before = ranks.run(keys)
    for _ in range(3):
        ranks.run(dist.destroy_process_group)
    assert ranks.run(keys) == before
