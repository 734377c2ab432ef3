"""Deferred signals, with one that arrives at each line of the code that defers them; and those that end a command."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from mlaunch.caller import interrupts
from mlaunch.caller.interrupts import EndSignal, allowed, deferred
from mlaunch.ranks.caller.kept_call import RanksFuture
from mlaunch.run import command


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Python's own, also for the alarm, and back to what was there."""
    numbers = (signal.SIGINT, signal.SIGALRM)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    yield
    sys.settrace(None)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def at_line(number: int, sent: signal.Signals) -> Callable[..., Any]:
    """A tracer that sends a signal at that line, counted as they run, of the module's code."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != interrupts.__file__:
            return None
        count += event == "line"
        if event == "line" and count == number:
            signal.raise_signal(sent)
        return trace

    return trace


def interrupted_at(number: int, sent: signal.Signals, done: list[str]) -> None:
    """A launch's shape: something that may not be interrupted, a wait, something again."""
    sys.settrace(at_line(number, sent))
    with deferred():
        done.append("begun")
        try:
            with allowed():
                pass
        except KeyboardInterrupt:
            done.append("interrupted")
        sys.settrace(None)
        signal.raise_signal(sent)  # a second one, in the part that may not be interrupted
        done.append("ended")


LINES = 100  # more than run
LIMIT = 60.0
MOMENTS = 300  # more than there are in any method of a future


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGALRM])
def test_a_signal_at_any_line(sent: signal.Signals) -> None:
    ways = []
    for line in range(1, LINES):
        done: list[str] = []
        with pytest.raises(KeyboardInterrupt):  # the first before the block has begun, or one of them at its end
            interrupted_at(line, sent, done)
        ways.append(tuple(done))
        for number in (signal.SIGINT, signal.SIGALRM):
            assert signal.getsignal(number) is signal.default_int_handler, line
        assert interrupts._deferrals == [], line
    assert set(ways) == {(), ("begun", "ended"), ("begun", "interrupted", "ended")}
    assert ways[-1] == ("begun", "ended")  # there were no more lines


def test_a_deferred_interrupt_is_handled_where_it_is_allowed() -> None:
    done = []
    with deferred():
        signal.raise_signal(signal.SIGINT)
        done.append("deferred")
        with pytest.raises(KeyboardInterrupt), allowed():
            done.append("not reached")
    assert done == ["deferred"]


def test_a_handler_that_the_user_sets_meanwhile_stays() -> None:
    def chosen(*_: object) -> None:
        pass

    with deferred(), allowed():
        signal.signal(signal.SIGINT, chosen)
    assert signal.getsignal(signal.SIGINT) is chosen


def test_a_launch_in_a_reduce_defers_by_itself() -> None:
    heard: list[str] = []
    signal.signal(signal.SIGINT, lambda *_: heard.append("handled"))
    with deferred(), allowed(), deferred():
        signal.raise_signal(signal.SIGINT)
        assert heard == []
        with allowed():
            assert heard == ["handled"]
    assert heard == ["handled"]


def at_moment(number: int) -> Callable[[FrameType, str, object], None]:
    """A profiler that has an interrupt handled at that one of the moments at which Python handles signals."""
    count = 0

    def profile(_: FrameType, event: str, __: object) -> None:
        nonlocal count
        if event in {"call", "c_return"}:
            count += 1
            if count == number:
                handler = signal.getsignal(signal.SIGINT)
                assert callable(handler)
                handler(signal.SIGINT, None)

    return profile


def others_can(use: Callable[[], object]) -> bool:
    other = threading.Thread(target=use, daemon=True)
    other.start()
    other.join(LIMIT)
    return not other.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("use", [
    lambda future: future.result(0.001),
    lambda future: future.exception(0.001),
    RanksFuture.done,
    lambda future: future.add_done_callback(str),
    RanksFuture.cancel,
    repr,
])  # fmt: skip
def test_an_interrupt_at_any_moment_of_a_future(use: Callable[[RanksFuture], object], finished: bool) -> None:
    """Whoever tells its values needs its lock."""
    seen: set[type[BaseException]] = set()
    for moment in range(1, MOMENTS):
        future = RanksFuture()
        if finished:
            future.set_result([])
        try:
            sys.setprofile(at_moment(moment))
            try:
                use(future)
            finally:
                sys.setprofile(None)
        except (KeyboardInterrupt, concurrent.futures.TimeoutError) as error:
            seen.add(type(error))
        assert others_can(future.done), moment
        assert future.cancelled() or finished or others_can(lambda told=future: told.set_result([]))  # type: ignore[misc]
    assert KeyboardInterrupt in seen


def test_signals_are_deferred_while_the_lock_of_a_future_is_taken() -> None:
    """Also just after it was taken: Python 3.14 handles signals there."""
    condition, done = interrupts.Condition(), []

    def take() -> None:
        with condition:
            signal.raise_signal(signal.SIGINT)
            done.append("deferred")
            with condition:
                done.append("twice")
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        take()
    assert done == ["deferred", "twice"]
    assert others_can(lambda: condition.acquire() and condition.release())
    assert interrupts._deferrals == []


def test_an_interrupt_of_whoever_waits_for_a_future() -> None:
    future, me = RanksFuture(), threading.get_ident()

    def interrupt() -> None:
        while not future._condition._waiters:
            os.sched_yield()
        signal.pthread_kill(me, signal.SIGINT)

    other = threading.Thread(target=interrupt, daemon=True)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        future.result(LIMIT)
    other.join(LIMIT)
    assert others_can(lambda: future.set_result([]))
    assert future.result() == []


def test_a_future_is_waited_for_by_many() -> None:
    future, heard = RanksFuture(), list[object]()
    waiting = [threading.Thread(target=lambda: heard.append(future.result(LIMIT)), daemon=True) for _ in range(3)]
    for thread in waiting:
        thread.start()
    future.set_result([1])
    for thread in waiting:
        thread.join(LIMIT)
    assert heard == [[1]] * 3


def test_an_alarm_beside_an_error_is_handled() -> None:
    heard: list[str] = []
    signal.signal(signal.SIGALRM, lambda *_: heard.append("handled"))
    with pytest.raises(ValueError, match="no such luck"), deferred():  # noqa: PT012
        signal.raise_signal(signal.SIGALRM)
        raise ValueError("no such luck")
    assert heard == ["handled"]


def test_an_error_that_is_on_its_way_is_not_replaced() -> None:
    with pytest.raises(ValueError, match="no such luck"), deferred():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        raise ValueError("no such luck")


def test_a_signal_that_was_ignored_when_the_command_began_does_not_end_it() -> None:
    """As SIGHUP is under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with command._stopping_at((signal.SIGHUP, signal.SIGINT)):
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(EndSignal, match="SIGINT"):
                signal.raise_signal(signal.SIGINT)
    finally:
        assert signal.signal(signal.SIGHUP, before) is signal.SIG_IGN
