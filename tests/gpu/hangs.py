"""Work without an end on a device: what is said of it, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mlaunch import LaunchError, LaunchTimeout, Ranks, launcher
from tests import launches
from tests.gpu.figures import MARK
from tests.gpu.parts import pause, where
from tests.gpu.place import HAS_TENSORS, check, count, needs_tensors, place

ASKS = 1000  # signals that ask for stacks
FOR_EVER, SECONDS = 2**60, 2**31  # cycles of a clock of 1 to 2 GHz
CALLER = "from tests.gpu import hangs; hangs.call()"


def spin(cycles: int) -> None:
    """Keeps the device busy and waits for it; where a device has no kernels, waits for ever."""
    where()  # progress, without which ``stall`` does not judge a function
    if HAS_TENSORS:
        torch.cuda._sleep(cycles)
    print("the kernel is queued", flush=True)
    if HAS_TENSORS:
        torch.cuda.synchronize()
    else:
        pause()


def call() -> None:
    launcher(spin, 1)(FOR_EVER)


@contextmanager
def caller() -> Iterator[subprocess.Popen[str]]:
    """A process whose call has just begun to wait for a kernel without an end."""
    process = subprocess.Popen(
        [sys.executable, "-c", CALLER], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "queued" in line:
                break
        yield process
    finally:
        process.kill()
        process.wait()


def ask(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mlaunch", *words], capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    print(f"$ mlaunch {' '.join(words)}\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout


def ends(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Ends the caller, and says when its call was over and the device did something else."""
    begun = time.perf_counter()
    process.send_signal(number)
    process.wait(30)
    print(f"{MARK}{f'{number.name} beside a kernel without an end':<44} {time.perf_counter() - begun:10.3f} s")
    check(len(launcher(where)()) == count(), f"the next call runs after {number.name}")


def endless() -> None:
    """A kernel without an end: why, stacks, ps; Ctrl-C, a kill, a deadline, stall."""
    with caller() as process:
        frame = "synchronize" if HAS_TENSORS else "spin"
        check(frame in ask("stacks"), "stacks shows where the rank waits")
        check("rank" in ask("why"), "why answers")
        ask("ps")
        ends(process, signal.SIGINT)
    with caller() as process:
        ends(process, signal.SIGKILL)
    try:
        launcher(spin, 1, deadline=5.0, grace_period=2.0)(FOR_EVER)
    except LaunchTimeout as error:
        check(".py:" in str(error), f"a deadline ends it: {str(error).splitlines()[0]}")
    try:
        launcher(spin, 1, stall="5 stop", deadline=20.0, grace_period=2.0)(FOR_EVER)
    except LaunchTimeout:
        print(f"{MARK}stall='5 stop' takes a rank that spins in synchronize() for one that works")
    except LaunchError as error:
        print(f"{MARK}stall='5 stop' ends it: {str(error).splitlines()[0]}")
    check(len(launcher(where)()) == count(), "the next call runs")


def interrupted() -> None:
    """Ctrl-C while ranks that stay wait for their device: the next call is right, on these ranks or on fresh ones."""
    needs_tensors()
    with Ranks() as ranks:
        before = ranks.run(os.getpid)
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        begun = time.perf_counter()
        try:
            ranks.run(spin, 3 * SECONDS)
        except KeyboardInterrupt:
            print(f"interrupted after {time.perf_counter() - begun:.1f} s of some 4")
        else:
            check(False, "the call is interrupted")
        after = ranks.run(os.getpid)
        print("the same ranks" if before == after else "fresh ranks", "run the next call")
        check(len(ranks.run(where)) == count(), "which is right")


def work_while_asked(number: int) -> tuple[int, float]:
    """Allocates, launches and captures while a thread sends the signal; returns the signals, and a sum."""
    main, sent, over = threading.main_thread().ident, [0], threading.Event()

    def send() -> None:
        while sent[0] < ASKS and not over.wait(0.002):
            signal.pthread_kill(main or 0, number)
            sent[0] += 1

    asking, total = threading.Thread(target=send), 0.0
    asking.start()
    while asking.is_alive():
        torch.cuda.empty_cache()
        block = torch.ones(2**22, device=place())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = block * 2
        graph.replay()
        total = float(result.sum().item())
    over.set()
    return sent[0], total


def signals() -> None:
    """The signal that asks a rank for its stack, a thousand times, while it allocates, launches and captures."""
    needs_tensors()
    number: Any = launches.STACK_SIGNAL
    check(launcher(work_while_asked, 1)(number) == [(ASKS, 2.0 * 2**22)], f"{ASKS} signals change nothing")


ALL = {"endless": endless, "interrupted": interrupted, "signals": signals}
