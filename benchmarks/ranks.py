"""Ranks that stay: an empty call against a launch and against the peers, one GiB both ways, failures, 10,000 calls."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import large, stayers
from benchmarks.contestant import in_a_process
from benchmarks.measure import Row, alternate, compare, seconds
from benchmarks.repeat import rss
from benchmarks.work import floor, make_gib
from mlaunch import Ranks, launcher
from mlaunch.caller.warm_server import warm_server

_SIZE = 4
_FLOOR = "a write and a read for each"
_ROW_LENGTH = 20  # calls, one after the other
_CALLS = 10_000
_GRACE = 1.0  # seconds


def nothing() -> None:
    """The empty function of all contestants."""


def loop() -> None:
    """Works in Python for ever."""
    while True:
        sum(range(1000))


def mismatched() -> None:
    """Rank 0 is elsewhere, and the others wait for it."""
    if dist.get_rank() == 0:
        loop()
    dist.all_reduce(torch.ones(1))


def run(rounds: int) -> list[Row]:
    return [*_empty(rounds), *_large(rounds), *_interrupts(rounds), *_growth()]


def _empty(rounds: int) -> list[Row]:
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(Ranks(n_gpus=_SIZE))
        names: dict[str, Callable[[], float]] = {
            "mlaunch Ranks": lambda: seconds(lambda: ranks.run(nothing)),
            "a warm launch": lambda: seconds(launcher(nothing, _SIZE)),
        }
        for name, way in {**stayers.ALL, _FLOOR: "floor"}.items():
            names[name] = stack.enter_context(in_a_process("benchmarks.stayers", way, _SIZE))
        for measure in names.values():
            with contextlib.suppress(Exception):  # which the measurement will tell
                measure()
        alone = alternate(names, rounds * 20)
        in_a_row = alternate({name: functools.partial(_in_a_row, measure) for name, measure in names.items()}, rounds)
    bounds = {"mlaunch Ranks": ("", "<= 2 ms"), "a warm launch": ("mlaunch Ranks", ">= 15")}
    bounds |= {name: ("mlaunch Ranks", ">= 1") for name in stayers.ALL} | {_FLOOR: ("mlaunch Ranks", "")}
    case = f"an empty call on {_SIZE} ranks"
    return [
        *compare(f"{case}, after other work", alone, bounds, "s"),
        *compare(f"{case}, {_ROW_LENGTH} in a row", in_a_row, bounds, "s"),
    ]


def _in_a_row(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(_ROW_LENGTH))


def _large(rounds: int) -> list[Row]:
    tensor = make_gib()
    with Ranks(n_gpus=4) as four, Ranks(n_gpus=2) as two, floor() as measure:
        names: dict[str, Callable[[], float]] = {
            "in, mlaunch Ranks": lambda: seconds(lambda: four.run(large.touch, tensor)),
            "in, one copy to fresh memory": lambda: measure("copy", 1),
            "out, mlaunch Ranks": lambda: _returned(two),
            "out, one copy to fresh memory": lambda: measure("copy", 2),
        }
        medians = alternate(names, rounds)
    bounds = {"in, mlaunch Ranks": ("in, one copy to fresh memory", "<= 1.4")}
    bounds["out, mlaunch Ranks"] = ("out, one copy to fresh memory", "<= 1.3")
    return compare("1 GiB in (4 ranks), out (of each of 2)", medians, bounds, "s")


def _returned(ranks: Ranks) -> float:
    values = ranks.run(large.make_and_return)
    end = time.perf_counter()
    return end - max(start for _, start in values)


def _interrupts(rounds: int) -> list[Row]:
    rows = []
    with Ranks(n_gpus=_SIZE, grace_period=_GRACE) as ranks:
        held = ranks.hold(torch.ones, 1000)
        for name, function, bound in (
            ("in a Python loop", loop, "<= 100 ms"),
            ("in a mismatched collective", mismatched, f"<= grace_period ({_GRACE:g} s) + 0.5 s"),
        ):
            times = [_interrupted(ranks, function) for _ in range(rounds)]
            intact = "held objects intact" if held.alive else "fresh ranks"
            rows.append(Row("Ctrl-C on 4 ranks", f"{name}, {intact}", statistics.median(times), "s", "", None, bound))
    return rows


def _interrupted(ranks: Ranks, function: Callable[[], None]) -> float:
    ranks.run(nothing)
    pressed = []

    def press() -> None:
        pressed.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.3, press)
    timer.start()
    try:
        ranks.run(function)
    except KeyboardInterrupt:
        return time.perf_counter() - pressed[0]
    raise RuntimeError("the interrupt was lost")


def _state(ranks: Ranks) -> dict[str, float]:
    pids = ranks.run(os.getpid)
    agent = int(Path(f"/proc/{pids[0]}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    server = warm_server.get(os.environ).pid
    everyone = [os.getpid(), agent, *pids]
    return {
        "processes": len(Path(f"/proc/{agent}/task/{agent}/children").read_text(encoding="utf-8").split()),
        "fds of fork server": len(os.listdir(f"/proc/{server}/fd")),
        "fds of caller, agent, ranks": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in everyone),
        "threads of caller, agent, ranks": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in everyone),
        "MiB of caller": rss(os.getpid()),
        "MiB of agent": rss(agent),
        "MiB of ranks": sum(map(rss, pids)),
    }


def _growth() -> list[Row]:
    with Ranks(n_gpus=2) as ranks:
        for _ in range(500):
            ranks.run(nothing)
        before = _state(ranks)
        for _ in range(_CALLS):
            ranks.run(nothing)
        after = _state(ranks)
    case = f"growth over {_CALLS:,} calls on 2 ranks"
    return [Row(case, name, after[name] - before[name], f"(from {before[name]:.0f})") for name in before]
