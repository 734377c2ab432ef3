"""Deferred signals, with one that arrives at each line of the code that defers them; and those that end a command."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from mlaunch.caller import interrupts
from mlaunch.caller.handle import StopSignal
from mlaunch.caller.interrupts import allowed, deferred
from mlaunch.cli import run


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
        with run._stopping_at((signal.SIGHUP, signal.SIGINT)):
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(StopSignal, match="SIGINT"):
                signal.raise_signal(signal.SIGINT)
    finally:
        assert signal.signal(signal.SIGHUP, before) is signal.SIG_IGN
