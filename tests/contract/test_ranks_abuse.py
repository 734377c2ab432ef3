"""What functions, callbacks and callers do to ranks that stay, and find them the same after it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import gc
import os
import resource
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mlaunch import LaunchError, Ranks, launcher
from tests import builds, launches
from tests.contract import crashes
from tests.contract.functions import caught, total
from tests.processes import wait_gone, wait_until

LIMIT = 60.0  # seconds, of every wait


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks(n_gpus=2) as opened:
        yield opened


@contextlib.contextmanager
def the_same(ranks: Ranks) -> Iterator[None]:
    """That the same processes go on, in step."""
    pids = ranks.run(os.getpid)
    yield
    assert ranks.run(os.getpid) == pids
    assert ranks.run(total) == [2.0, 2.0]


# Exceptions


def each_others_cause() -> None:
    """As where a second attempt fails, and the first error is raised from the second's."""
    try:
        raise ValueError("no such luck")
    except ValueError as first:
        try:
            raise LookupError("again") from first
        except LookupError as second:
            raise first from second


class Frozen(ValueError):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


def refuses_attributes() -> None:
    raise Frozen("no such luck")


@pytest.mark.parametrize("fail", [each_others_cause, refuses_attributes])
def test_exceptions(ranks: Ranks, fail: Callable[[], None]) -> None:
    with the_same(ranks), pytest.raises(ValueError, match="no such luck"):
        ranks.run(fail)


# What is left as it was changed


class Refuses:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        raise RuntimeError("no such luck")


def close_stdout() -> None:
    sys.stdout.close()


def close_streams() -> None:
    for fd in range(3):
        os.close(fd)


@pytest.mark.parametrize(
    "change",
    [
        close_stdout,
        lambda: setattr(sys, "stdout", None),
        lambda: setattr(sys, "stdout", Refuses()),
        close_streams,
    ],
    ids=["closed", "none", "refuses", "descriptors"],
)
def test_streams(ranks: Ranks, change: Callable[[], None]) -> None:
    with the_same(ranks):
        ranks.run(change)
        assert ranks.run(lambda: [1] * 1000) == [[1] * 1000] * 2


def test_closed_streams_are_nothing_that_the_next_call_writes_to(ranks: Ranks) -> None:
    """Its own answer, say."""
    with the_same(ranks):
        ranks.run(close_streams)
        found = ranks.run(lambda: [print("x", flush=True), *(os.readlink(f"/proc/self/fd/{fd}") for fd in range(3))])
        assert found == [[None, *["/dev/null"] * 3]] * 2


def test_another_handler_is_that_of_its_call(ranks: Ranks) -> None:
    """The next one can be called back."""

    def work() -> None:
        if dist.get_rank() == 0:
            raise ValueError("no such luck")
        while True:
            signal.sigtimedwait([], 0.01)

    with the_same(ranks):
        ranks.run(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN) and None)
        with pytest.raises(ValueError, match="no such luck"):
            ranks.run(work)


# Callbacks


def wait_for_ever() -> None:
    while True:
        signal.sigtimedwait([], 0.01)


def test_a_callback_may_close_as_its_call_is_cancelled() -> None:
    ranks = Ranks(n_gpus=2, grace_period=0.1)
    running, queued, last = ranks.submit(wait_for_ever), ranks.submit(int), ranks.submit(int)
    queued.add_done_callback(lambda _: ranks.close())
    ranks.terminate()
    assert queued.cancelled()
    assert last.cancelled()
    assert running.done()


def test_a_callback_may_exit(ranks: Ranks, tmp_path: Path) -> None:
    def leave(_: Future[Any]) -> None:
        sys.exit(3)

    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with the_same(ranks):
        first = ranks.submit(lambda: dist.get_rank() or (gate.read_text() and 0))
        first.add_done_callback(leave)
        gate.write_text("go")
        assert first.result(LIMIT) == [0, 1]
        assert ranks.submit(lambda: 2).result(LIMIT) == [2, 2]


# Callers


def die() -> None:
    os._exit(3)


def test_what_belongs_to_the_caller_alone_says_so(ranks: Ranks) -> None:
    """In a call's function, its arguments, or a value that ranks hold; in words of the user's own names."""
    future, run = ranks.submit(int), launcher(int, 1).submit()
    belongs = "only the process that made these ranks can call them: call them there, and pass what they return"
    with the_same(ranks):
        with pytest.raises(TypeError, match=rf"uses the variable 'ranks', a mlaunch.Ranks, which .* \({belongs}\)"):
            ranks.run(lambda: ranks.run(int))
        with pytest.raises(
            TypeError, match=rf"argument 0 of id\(\)\['here'\] is a mlaunch.Ranks, which .* \({belongs}\)"
        ):
            launcher(id, 1)({"here": ranks})
        for one, name in ((future, "RanksFuture"), (run, "Run")):
            with pytest.raises(
                TypeError, match=rf"is a mlaunch.{name}, which .* \(only the process .* pass its result"
            ):
                ranks.hold(id, one)
        with pytest.raises(TypeError, match=r"is a mlaunch.Sweep, which .* \(only the process .*: pass its results"):
            ranks.run(id, launcher(int, 1).map([1]))
        assert (future.result(LIMIT), run.result(LIMIT)) == ([0, 0], [0])


def test_a_callback_may_wait_for_what_it_submits(ranks: Ranks, tmp_path: Path) -> None:
    found: Future[Any] = Future()

    def again(_: object) -> None:
        late = ranks.submit(wait_for, str(tmp_path / "gate"))
        with contextlib.suppress(concurrent.futures.TimeoutError):
            found.set_result(late.result(0))  # in vain
        (tmp_path / "gate").touch()
        failed = ranks.submit(int, "no number")
        found.set_result((late.result(LIMIT), type(failed.exception(LIMIT)), ranks.submit(int).result(LIMIT)))

    with the_same(ranks):
        ranks.submit(int).add_done_callback(again)
        assert found.result(LIMIT) == ([None, None], ValueError, [0, 0])


@pytest.mark.slow
def test_a_callback_may_submit_beside_a_call(ranks: Ranks) -> None:
    """As whoever tries again does, while another thread starts fresh ranks."""
    for _ in range(3):
        ranks.run(int)
        told, calls, again = threading.Event(), threading.Event(), list[Any]()

        def retry(_: object, told=told, calls=calls, again=again) -> None:  # type: ignore[no-untyped-def]
            told.set()
            calls.wait(LIMIT)
            again.append(ranks.submit(total))

        ranks.submit(die).add_done_callback(retry)
        assert told.wait(LIMIT)
        calls.set()
        assert ranks.run(total) == [2.0, 2.0]
        wait_until(functools.partial(bool, again))
        assert again[0].result(LIMIT) == [2.0, 2.0]


def test_a_callback_may_close_while_the_thread_that_runs_it_calls(tmp_path: Path) -> None:
    ranks, gate = Ranks(n_gpus=2), tmp_path / "gate"
    first = ranks.submit(wait_for, str(gate))
    first.add_done_callback(lambda _: ranks.close())

    def open_gate() -> None:
        wait_until(lambda: launches.driving_thread(ranks) == main)
        gate.touch()

    main = threading.get_ident()
    opens = threading.Thread(target=open_gate)
    opens.start()
    assert ranks.run(total) == [2.0, 2.0]
    opens.join(LIMIT)
    with pytest.raises(RuntimeError, match="closed"):
        ranks.run(total)


def wait_for(path: str) -> None:
    wait_until(lambda: os.path.exists(path))


def test_an_object_freed_with_a_cancelled_call_is_freed_with_the_next(ranks: Ranks, tmp_path: Path) -> None:
    def numbers() -> list[int]:
        return launches.held_numbers()

    held, gate = ranks.hold(list), tmp_path / "gate"
    assert ranks.run(numbers) == [[launches.number_of(held)]] * 2
    first = ranks.submit(wait_for, str(gate))
    held.free()
    assert ranks.submit(int).cancel()
    gate.touch()
    first.result(LIMIT)
    assert ranks.run(numbers) == [[], []]


def test_an_object_freed_with_a_call_that_no_rank_can_read_is_freed_with_the_next(ranks: Ranks) -> None:
    class Unreadable:
        def __reduce__(self) -> tuple[Callable[[str], float], tuple[str]]:
            return float, ("no number",)

    def numbers() -> list[int]:
        return launches.held_numbers()

    held = ranks.hold(list)
    held.free()
    with pytest.raises(ValueError, match="no number"):
        ranks.run(id, Unreadable())
    assert ranks.run(numbers) == [[], []]


def test_reports_are_read_while_others_are_made(ranks: Ranks) -> None:
    ranks.run(int)
    latest = launches.reports_of(ranks)[-1]

    def made_meanwhile() -> Any:
        launches.reports_of(ranks).append(latest)
        return latest()

    launches.reports_of(ranks).append(made_meanwhile)
    launches.reports_of(ranks).append(latest)
    assert len(ranks.history) == 3


def test_a_fork_made_while_locks_are_taken_is_refused_at_once(ranks: Ranks) -> None:
    taken, free = threading.Event(), threading.Event()

    def hold_locks() -> None:
        with launches.locks_of(ranks):
            taken.set()
            free.wait(LIMIT)

    other = threading.Thread(target=hold_locks)
    other.start()
    assert taken.wait(LIMIT)
    child = os.fork()
    if child == 0:
        signal.alarm(int(LIMIT))
        refused = "this process is a fork of it" in str(caught(lambda: ranks.run(int)))
        ranks.close()
        launches.abandon(ranks)  # as the collector does
        os._exit(not refused)
    free.set()
    other.join(LIMIT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ranks.run(total) == [2.0, 2.0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the ranks were lost between calls")
def test_a_call_that_is_queued_as_a_rank_ends_does_not_begin_on_the_others(ranks: Ranks) -> None:
    """They are about to leave, and would be all that it hears of."""
    pids, session = ranks.run(os.getpid), launches.session_of(ranks)
    with ThreadPoolExecutor(1) as pool:
        with session.lock:
            while select.select([session.fileno()], [], [], 0.0)[0]:  # what is left of the call before
                session.step()
            os.kill(pids[0], signal.SIGSTOP)  # its end comes later
            os.kill(pids[1], signal.SIGKILL)
            # The agent's own word: what the rank prints to is at its end before that.
            assert select.select([session.handle.agent.fileno()], [], [], LIMIT)[0]
            submitted = pool.submit(ranks.submit, total)
            wait_until(lambda: not session.idle)
            session.step()
            os.kill(pids[0], signal.SIGCONT)
        assert submitted.result(LIMIT).result(LIMIT) == [2.0, 2.0]


@pytest.mark.slow
@builds.silent  # ranks that print have pipes open, one of which may close meanwhile
@pytest.mark.parametrize("waits", [True, False])
def test_no_descriptor_is_left_for_what_ranks_answer(ranks: Ranks, *, waits: bool) -> None:
    assert ranks.run(total) == [2.0, 2.0]
    with one_descriptor():
        large = bytes, 1 << 20
        error = caught(lambda: ranks.run(*large)) if waits else ranks.submit(*large).exception(LIMIT)
    assert isinstance(error, OSError)
    assert error.errno == errno.EMFILE
    assert "what they held is lost" in "".join(error.__notes__)
    assert ranks.run(total) == [2.0, 2.0]
    assert ranks.submit(total).result(LIMIT) == [2.0, 2.0]


@contextlib.contextmanager
def one_descriptor() -> Iterator[None]:
    """While this process can open only one file more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, limits[1]))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
def test_a_handle_that_the_ranks_have_keeps_nobody_alive() -> None:
    ranks = Ranks(n_gpus=2)
    ranks.model = ranks.hold(list)  # type: ignore[attr-defined]
    pids = ranks.run(os.getpid)
    del ranks
    gc.collect()
    wait_gone(pids)
    for thread in threading.enumerate():
        if thread.name == "mlaunch-ranks":
            thread.join(LIMIT)


@pytest.mark.parametrize("pause", [0.01, 0.0])
def test_an_interrupt_that_python_drops_is_raised_again(ranks: Ranks, pause: float) -> None:
    """Where it comes in a finalizer, nobody can raise it; nor, at once, while Python still tells of that."""

    class Slow:
        def __del__(self) -> None:
            while True:
                signal.sigtimedwait([], 0.01)

    def work() -> None:
        launches.interrupt_again_after(pause)
        if dist.get_rank() == 0:
            raise ValueError("no such luck")
        Slow()
        wait_for_ever()

    with the_same(ranks), pytest.raises(ValueError, match="no such luck"):
        ranks.run(work)


# Descriptors of the caller


KEPT = ["wakes", "ends", "thread", "relay", "channel", "agent", "way", "answers", "all there", "output"]


@pytest.mark.nightly(  # each once, the two ways in turn
    *("wakes-run", "ends-submitted", "thread-run", "relay-submitted", "channel-run", "agent-submitted"),
    *("way-run", "answers-submitted", "all there-run", "output-submitted"),
)
@pytest.mark.parametrize("submitted", [False, True], ids=["run", "submitted"])
@pytest.mark.parametrize("which", [*([name] for name in KEPT), KEPT], ids=[*KEPT, "all"])
def test_a_file_that_took_a_number_of_the_caller_s(tmp_path: Path, which: list[str], submitted: bool) -> None:
    with Ranks(n_gpus=2) as ranks, open(tmp_path / "mine", "w+b") as file:
        ranks.run(int)
        numbers = [launches.descriptors_of(ranks)[name] for name in which]
        for number in numbers:
            os.dup2(file.fileno(), number)
        lost = set(which) - {"agent", "output"}  # without which calls go on
        told = pytest.warns(RuntimeWarning, match="other code in this process closed the descriptors")
        with told if lost and not submitted else contextlib.nullcontext(), warnings.catch_warnings():
            if submitted:
                warnings.simplefilter("ignore")  # whether the thread has found out by then is a matter of time
            for _ in range(2):
                assert (ranks.submit(int).result(LIMIT) if submitted else ranks.run(int)) == [0, 0]
        ranks.close()
        assert os.fstat(file.fileno()).st_size == 0
        for number in numbers:
            assert os.path.samestat(os.fstat(number), os.fstat(file.fileno()))
            os.close(number)


@pytest.mark.parametrize("which", ["wakes", "all there", "thread", "relay"])
def test_another_of_its_kind_that_took_a_number_of_the_caller_s(which: str) -> None:
    """The system says the same of all eventfds, and of all epolls."""
    with Ranks(n_gpus=1) as ranks:
        ranks.run(int)
        number, made = launches.descriptors_of(ranks)[which], select.epoll() if which in {"thread", "relay"} else None
        mine = os.eventfd(0, os.EFD_NONBLOCK) if made is None else made.fileno()
        os.dup2(mine, number)
        with pytest.warns(RuntimeWarning, match="other code in this process closed the descriptors"):
            assert ranks.run(int) == [0]
        assert ranks.submit(int).result(LIMIT) == [0]
    os.close(number)  # it was left alone
    if made is None:
        with pytest.raises(BlockingIOError):
            os.eventfd_read(mine)
        os.close(mine)
    else:
        assert made.poll(0) == []
        made.close()


def test_a_call_that_runs_as_the_numbers_are_closed() -> None:
    """It is lost, since nobody hears of it any more; the next one runs."""
    with Ranks(n_gpus=2) as ranks:
        ranks.run(int)
        future = ranks.submit(crashes.hang)
        for number in launches.descriptors_of(ranks).values():
            with contextlib.suppress(OSError):  # the thread has heard of it, and closes what is left
                os.close(number)
        with pytest.raises(LaunchError, match="other code in this process closed"):
            future.result(LIMIT)
        assert ranks.run(int) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("which", [["relay"], KEPT], ids=["relay", "all"])
def test_a_waiting_thread_hears_that_another_has_closed_the_descriptors(which: list[str]) -> None:
    """Neither a bare error of the system's comes of it, nor does the caller wait for ever."""
    waiting: Future[None] = Future()

    def wait() -> None:
        waiting.set_exception(caught(lambda: ranks.run(crashes.hang)))

    with Ranks(n_gpus=2) as ranks:
        ranks.run(int)
        threading.Thread(target=wait, daemon=True).start()
        wait_until(lambda: launches.driving_thread(ranks) is not None)
        for number in [launches.descriptors_of(ranks)[name] for name in which]:
            with contextlib.suppress(OSError):  # who waits has heard of it, and closes what is left
                os.close(number)
        assert "other code in this process closed" in str(waiting.exception(LIMIT))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the thread may have found it as the call had not begun
            assert ranks.run(int) == [0, 0]


# Signal handlers


class Late(Exception):
    """What the handler of an alarm raises."""


def late(*_: object) -> None:
    raise Late


class Alarming:
    """Its pickling takes until the alarm comes."""

    def __reduce__(self) -> str:
        signal.raise_signal(signal.SIGALRM)
        return "never"


@pytest.mark.parametrize("stays", [False, True])
def test_an_alarm_while_arguments_are_pickled_is_no_fault_of_theirs(ranks: Ranks, stays: bool) -> None:
    before = signal.signal(signal.SIGALRM, late)
    try:
        with pytest.raises(Late):
            launcher(len, 2, ranks=ranks if stays else None)(Alarming())
    finally:
        signal.signal(signal.SIGALRM, before)
    with the_same(ranks):
        pass
