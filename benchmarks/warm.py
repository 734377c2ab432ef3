"""A call when everything is warm: n ranks join, reduce once and return the value."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.multiprocessing

from benchmarks import work
from benchmarks.contestant import in_a_process
from benchmarks.measure import Row, alternate, compare, seconds
from mlaunch import launcher

_FLOOR = "floor (bare os.fork)"
_PAUSE = 0.3  # seconds
_REST = 1.0  # seconds, in which what a contestant has left behind comes to its end


def run(rounds: int) -> list[Row]:
    rows: list[Row] = []
    with work.floor() as floor:
        for size in (2, 4, 8):
            ours = launcher(work.reduce_once, size)
            bare = functools.partial(floor, "reduce", size)
            for how, take, bound in (("back to back", _in_a_row, "<= 1.3"), ("after a pause", _later, "<= 0.65")):
                contestants: dict[str, Callable[[], float]] = {
                    "mlaunch": functools.partial(take, functools.partial(seconds, ours)),
                    _FLOOR: functools.partial(take, bare),
                }
                for contestant in contestants.values():
                    contestant()
                medians = alternate(contestants, rounds * 5)
                rows += compare(f"warm call {how}, {size} ranks", medians, {"mlaunch": (_FLOOR, bound)}, "s")
    return rows + _peers(rounds)


def _in_a_row(measure: Callable[[], float]) -> float:
    """Measures the third of three calls: nothing is prepared for it, nor beside it for another contestant."""
    time.sleep(_PAUSE)
    measure()
    measure()
    return measure()


def _later(measure: Callable[[], float]) -> float:
    """Measures a call after a pause, in which its launch was prepared."""
    time.sleep(_PAUSE)
    return measure()


def _settled(call: Callable[[], object]) -> float:
    """Measures a call after a pause, and after one that pays for the pages that accelerate's fork left to be copied."""
    call()
    return _later(functools.partial(seconds, call))


def _rested(call: Callable[[], object]) -> float:
    """Measures a call whose processes are busy for half a second after it has returned, as torchrunx's are."""
    taken = seconds(call)
    time.sleep(_REST)
    return taken


def _peers(rounds: int) -> list[Row]:
    with contextlib.ExitStack() as running:
        peers = {name: running.enter_context(in_a_process("benchmarks.warm", way)) for name, way in _PEERS.items()}
        medians = alternate(peers, rounds)
    bounds = {"torch.multiprocessing.spawn": ("mlaunch", ">= 100")}
    bounds |= {name: ("mlaunch", "") for name in ("torchrunx", "accelerate notebook_launcher")}
    return compare("warm call after a pause, 2 ranks, peers", medians, bounds, "s")


@contextlib.contextmanager
def ours() -> Iterator[Callable[[], float]]:
    call = launcher(work.reduce_once, 2)
    call()
    yield lambda: _settled(call)


@contextlib.contextmanager
def spawn() -> Iterator[Callable[[], float]]:
    yield lambda: seconds(_spawn)


@contextlib.contextmanager
def torchrunx() -> Iterator[Callable[[], float]]:
    yield lambda: _rested(_torchrunx)


@contextlib.contextmanager
def accelerate() -> Iterator[Callable[[], float]]:
    yield lambda: seconds(_accelerate)


_PEERS = {
    "mlaunch": "ours",
    "torch.multiprocessing.spawn": "spawn",
    "torchrunx": "torchrunx",
    "accelerate notebook_launcher": "accelerate",
}


def _spawn() -> None:
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(work.join_and_reduce, (2, work.free_port(), queue), nprocs=2)
    values = dict(queue.get() for _ in range(2))
    if values != {0: 2.0, 1: 2.0}:
        raise RuntimeError(f"spawn returned {values}")


def _torchrunx() -> None:
    with tempfile.TemporaryDirectory() as folder, _inside(folder):  # it writes its logs where it is
        _torchrunx_here()


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _torchrunx_here() -> None:
    import torchrunx

    # Its agents are started where this process is, and import the function from here.
    found = {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    ours = torchrunx.Launcher(hostnames=["localhost"], workers_per_host=2, backend="gloo", extra_env_vars=found)
    results = ours.run(work.reduce_once)
    if results.rank(0) != 2.0:
        raise RuntimeError(f"torchrunx returned {results}")


def _accelerate() -> None:
    import accelerate

    with contextlib.redirect_stdout(io.StringIO()):
        accelerate.notebook_launcher(work.join_by_environment, (), num_processes=2, use_port=str(work.free_port()))
