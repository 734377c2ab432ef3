"""Many requests to stop, at random moments: all ranks stop at the same step, none misses it, and none hangs.

    python -m tests.stop_storm [requests] [seed]
    python -m tests.stop_storm [requests] [seed] by-hand

A fifth each of the calls on ranks of one machine, in step with each other by a collective and free; the same over two
machines, which two threads serve; and launches that a signal asks. Each rank takes steps of up to a millisecond, some
of which are ten times as long. The request comes at some moment of the first 20 ms. The second form is of
two machines that have a caller each, of which one hears the signal (one or two requests a second, since they join): in
half of the calls while they join, in the others at some moment of the first 20 ms in which ranks take steps.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mlaunch
from mlaunch import Ranks, launcher
from tests.contract.test_engine_calls import Threads
from tests.processes import listen

_MOST_STEPS = 10**5
_PATIENCE = 120.0  # seconds after which a call hangs
_WINDOW = 0.02  # seconds in which the request comes
Ask = Callable[[float], Sequence[int]]  # gets the delay; returns each rank's step


def work(in_step: bool, seed: int, marker: str = "") -> int:
    """Returns the step at which it was told to stop; 0: it was not. ``marker``: a file to make at the first one."""
    chance = random.Random(seed + dist.get_rank())
    if marker:
        Path(marker).touch()
    for step in range(1, _MOST_STEPS):
        if in_step:
            dist.all_reduce(torch.ones(1))
        signal.sigtimedwait([], chance.random() * (1e-2 if chance.random() < 0.05 else 1e-3))
        if mlaunch.stopping():
            return step
    return 0


@dataclass
class Told:
    """What came of the requests."""

    requests: int = 0
    at_different_steps: int = 0
    missed: int = 0
    hung: int = 0
    failed: list[str] = field(default_factory=list)
    by_kind: collections.Counter[str] = field(default_factory=collections.Counter)

    def take(self, kind: str, steps: Sequence[int]) -> None:
        self.requests += 1
        self.by_kind[kind] += 1
        self.missed += 0 in steps
        self.at_different_steps += len(set(steps)) > 1


def storm(requests: int, seed: int = 1, *, by_hand: bool = False) -> Told:
    """Makes them; what hangs is told, and ends it."""
    chance, told = random.Random(seed), Told()
    with contextlib.ExitStack() as stack:
        kinds = (
            {"by hand": lambda delay: _by_signal(chance, delay, _by_hand)}
            if by_hand
            else {name: stack.enter_context(ways) for name, ways in _kinds(chance)}
        )
        for name in [chance.choice(list(kinds)) for _ in range(requests)]:
            try:
                told.take(name, kinds[name](chance.random() * _WINDOW))
            except TimeoutError:
                told.hung += 1
                break
            except Exception as error:
                told.failed.append(f"{name}: {type(error).__name__}: {error}")
    return told


def _kinds(chance: random.Random) -> Iterator[tuple[str, contextlib.AbstractContextManager[Ask]]]:
    for where, options in (("one machine", {}), ("two machines", {"engine": Threads()})):
        for in_step in (True, False):
            yield f"{where}, {'in step' if in_step else 'free'}", _on_ranks(chance, options, in_step=in_step)
    yield "launches", contextlib.nullcontext(lambda delay: _by_signal(chance, delay, _launch))


@contextlib.contextmanager
def _on_ranks(chance: random.Random, options: dict[str, Threads], *, in_step: bool) -> Iterator[Ask]:
    with Ranks(n_gpus=2, stop_grace=60.0, **options) as ranks:  # type: ignore[arg-type]

        def ask(delay: float) -> Sequence[int]:
            future = ranks.submit(work, in_step, chance.getrandbits(30))
            signal.sigtimedwait([], delay)
            while not ranks.stop() and not future.done():  # it has not begun
                os.sched_yield()
            found: Sequence[int] = future.result(_PATIENCE)
            return found

        yield ask


def _launch(in_step: bool, seed: int, _marker: str) -> list[int]:
    return launcher(work, 2, stop_on="USR1", deadline=_PATIENCE)(in_step, seed)


def _by_hand(in_step: bool, seed: int, marker: str) -> list[int]:
    with listen() as listener:
        port = listener.getsockname()[1]
    options: dict[str, Any] = {"world_size": 2, "port": port, "token": "hush" * 8, "deadline": _PATIENCE}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(launcher(work, 1, rank_start=1, **options), in_step, seed, marker)
        return [*launcher(work, 1, stop_on="USR1", **options)(in_step, seed, marker), *other.result()]


def _by_signal(chance: random.Random, delay: float, call: Callable[[bool, int, str], list[int]]) -> Sequence[int]:
    """Asks a launch by a signal to this process."""
    over = threading.Event()
    folder = tempfile.TemporaryDirectory()
    marker = Path(folder.name, "steps")
    early = call is _launch or chance.random() < 0.5  # machines join for a second, and launches are prepared

    def ask() -> None:
        while not (early or marker.exists() or over.wait(1e-3)):
            pass
        left = delay + 0.02 * early
        while not over.wait(left):  # again, as the first may come before the call
            os.kill(os.getpid(), signal.SIGUSR1)
            left = 1.0

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        return call(chance.random() < 0.5, chance.getrandbits(30), str(marker))
    except mlaunch.LaunchTimeout as error:
        raise TimeoutError from error
    finally:
        over.set()
        asking.join()
        folder.cleanup()


def main() -> None:
    numbers = [int(word) for word in sys.argv[1:3]]
    requests, seed = (*numbers, *(1000, 1)[len(numbers) :])
    begun = time.monotonic()
    print(storm(requests, seed, by_hand=sys.argv[3:] == ["by-hand"]), f"{time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # of a launch that is over
    main()
