"""Contestants of the benchmarks leave nothing in the process that compares them."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from benchmarks.contestant import ContestantError, in_a_process
from benchmarks.measure import alternate


@contextlib.contextmanager
def noisy(number: int) -> Iterator[Callable[[], float]]:
    """Installs a handler and prints, as some peers do."""
    signal.signal(signal.SIGINT, lambda *_: None)
    os.write(1, b"to standard output\n")

    def measure() -> float:
        print("more of it")
        return float(number)

    yield measure


@contextlib.contextmanager
def absent() -> Iterator[Callable[[], float]]:
    raise ModuleNotFoundError("no such peer")
    yield


@contextlib.contextmanager
def failing() -> Iterator[Callable[[], float]]:
    def measure() -> float:
        raise ValueError("no such luck")

    yield measure


@contextlib.contextmanager
def dying() -> Iterator[Callable[[], float]]:
    yield lambda: os._exit(3)


def test_a_contestant_in_a_process_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with in_a_process(__name__, "noisy", 3) as measure:
        assert [measure(), measure()] == [3.0, 3.0]
    assert signal.getsignal(signal.SIGINT) == before
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent", "ModuleNotFoundError: no such peer"),
        ("failing", "ValueError: no such luck"),
        ("dying", "its process ended"),
    ],
)
def test_a_contestant_that_cannot_run(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with in_a_process(__name__, name) as measure:
        for _ in range(2):
            with pytest.raises(ContestantError, match=words):
                measure()
        assert math.isnan(alternate({"a peer": measure}, 1)["a peer"])
    assert words in capsys.readouterr().err
