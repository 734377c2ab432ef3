"""A random walk over what can be done with ranks that stay, against a model that knows what must be alive."""

from __future__ import annotations

import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mlaunch import Held, LaunchError, LaunchTimeout, Ranks, launcher
from tests import launches
from tests.contract.functions import total, wait_in_vain
from tests.processes import wait_gone

SEED = int(os.environ.get("MLAUNCH_WALK_SEED", str(random.SystemRandom().randrange(1_000_000))))
LIMIT = 60.0  # seconds, of every wait
VITAL = {"wakes", "ends", "thread", "relay", "channel", "way", "answers", "all there"}  # of the caller's descriptors
COUNT = int(os.environ.get("MLAUNCH_WALK", "300"))


def spin() -> None:
    while True:
        signal.sigtimedwait([], 0.01)


def fail_on(which: list[int], others: str) -> None:
    if dist.get_rank() in which:
        raise ValueError("no such luck")
    if others == "spin":
        spin()


def interrupt(caller: int) -> None:
    if dist.get_rank() == 0:
        os.kill(caller, signal.SIGINT)
    spin()


def kill() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    spin()


def send_and_fail() -> None:
    sys.left_here = dist.isend(torch.ones(3), 1 - dist.get_rank())  # type: ignore[attr-defined]
    dist.barrier()
    raise ValueError("no such luck")


def module_value() -> int:
    import walked_module  # type: ignore[import-not-found]

    value: int = walked_module.VALUE
    return value


def held_numbers() -> list[int]:
    return launches.held_numbers()


def follow(other: Future[Any], one: Future[Any]) -> None:
    """Has one end as another does."""

    def end(_: object) -> None:
        error = other.exception()
        if error is None:
            one.set_result(other.result())
        else:
            one.set_exception(error)

    other.add_done_callback(end)


def make(number: int) -> list[int]:
    return [number, dist.get_rank()]


class Walk:
    """``held``: the handles that must work, with what they stand for and the objects' identities; ``gone``: others.

    ``module``: a file that ranks import; it says ``version``, and ranks have read ``loaded``, None for nothing.
    """

    def __init__(self, chance: random.Random, module: Path) -> None:
        self.chance, self.module = chance, module
        self.version = 0
        self.loaded: int | None = None
        self.edit()
        self.held: dict[Held, tuple[int, list[int]]] = {}
        self.gone: list[Held] = []
        self.number = 0
        self.open()

    def open(self) -> None:
        # On a busy machine ranks take a while to come back after an error, and would count as lost.
        self.ranks = Ranks(n_gpus=2, grace_period=2.0)
        self.pids = self.ranks.run(os.getpid)

    def lose(self) -> None:
        self.forget()
        wait_gone(self.pids)
        self.pids = self.ranks.run(os.getpid)

    def forget(self) -> None:
        self.gone += self.held
        self.held.clear()
        self.loaded = None

    def step(self) -> str:
        steps: list[Callable[[], None]] = [self.run, self.hold, self.fetch, self.free, self.use_gone, self.fail]
        steps += [self.cancel, self.free_with_a_cancelled_call, self.submit_in_a_callback]
        steps += [self.use_the_module, self.edit, self.reload]
        rare: list[Callable[[], None]] = [self.interrupt, self.deadline, self.mismatch, self.kill, self.close]
        rare += [self.kill_before_others, self.close_in_a_callback, self.destroy_the_group, self.message, self.fork]
        rare += [self.take_a_number]
        chosen = self.chance.choice(steps * 3 + rare)
        chosen()
        return chosen.__name__

    def check(self) -> None:
        assert self.ranks.run(os.getpid) == self.pids
        for held, (number, ids) in self.held.items():
            assert held.alive
            assert self.ranks.run(lambda x: (id(x), x), held) == [(ids[rank], [number, rank]) for rank in range(2)]
        assert not any(held.alive for held in self.gone)

    # What can be done

    def run(self) -> None:
        assert self.ranks.run(total) == [2.0, 2.0]

    def hold(self) -> None:
        if len(self.held) < 4:
            self.number += 1
            held = self.ranks.hold(make, self.number)
            self.held[held] = self.number, self.ranks.run(id, held)

    def fetch(self) -> None:
        for held in self.some():
            assert held.fetch(1) == [self.held[held][0], 1]

    def free(self) -> None:
        for held in self.some():
            held.free()
            del self.held[held]
            self.gone.append(held)

    def use_gone(self) -> None:
        for held in self.gone[-1:]:
            with pytest.raises(ValueError, match=r"held value \d+ "):
                self.ranks.run(id, held)

    def fail(self) -> None:
        which, others = self.chance.choice([[0], [1], [0, 1]]), self.chance.choice(["return", "spin"])
        with pytest.raises(ValueError, match="no such luck"):
            self.ranks.run(fail_on, which, others)

    def interrupt(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.ranks.run(interrupt, os.getpid())

    def deadline(self) -> None:
        with pytest.raises(LaunchTimeout):
            launcher(spin, deadline=0.1).options(ranks=self.ranks)()

    def mismatch(self) -> None:
        with pytest.raises(ValueError, match="no such luck"):
            self.ranks.run(wait_in_vain, self.chance.randrange(2), "in vain")
        self.lose()

    def kill(self) -> None:
        if self.chance.randrange(2):
            with pytest.raises(LaunchError, match=r"rank 1.* was killed by SIGKILL"):
                self.ranks.run(kill)
        else:
            os.kill(self.pids[self.chance.randrange(2)], signal.SIGKILL)
            wait_gone(self.pids)
            error = self.ranks.submit(total).exception(60)  # if the call was sent before that was known
            assert error is None or "was killed by SIGKILL" in str(error)
        self.lose()

    def close(self) -> None:
        self.ranks.close()
        wait_gone(self.pids)
        with pytest.raises(RuntimeError, match="these ranks were closed"):
            self.ranks.run(total)
        self.forget()
        self.open()

    def cancel(self) -> None:
        first, second, third = (self.ranks.submit(total) for _ in range(3))
        is_cancelled = second.cancel()  # else it was begun already
        assert first.result(LIMIT) == third.result(LIMIT) == [2.0, 2.0]
        assert is_cancelled or second.result(LIMIT) == [2.0, 2.0]

    def free_with_a_cancelled_call(self) -> None:
        first = self.ranks.submit(total)
        self.free()
        self.ranks.submit(total).cancel()
        first.result(LIMIT)
        wanted = sorted(launches.number_of(held) for held in self.held)
        assert self.ranks.run(held_numbers) == [wanted, wanted]

    def submit_in_a_callback(self) -> None:
        again: Future[list[float]] = Future()
        self.ranks.submit(total).add_done_callback(lambda _: follow(self.ranks.submit(total), again))
        assert self.ranks.run(total) == again.result(LIMIT) == [2.0, 2.0]

    def kill_before_others(self) -> None:
        """What waits runs on fresh ranks, as does what a callback of the failed call submits."""
        again: Future[list[float]] = Future()
        failed = self.ranks.submit(kill)
        failed.add_done_callback(lambda _: follow(self.ranks.submit(total), again))
        waiting, cancelled = self.ranks.submit(total), self.ranks.submit(total)
        cancelled.cancel()
        assert "was killed by SIGKILL" in str(failed.exception(LIMIT))
        assert waiting.result(LIMIT) == again.result(LIMIT) == [2.0, 2.0]
        self.lose()

    def close_in_a_callback(self) -> None:
        closed: Future[None] = Future()

        def close(_: object) -> None:
            self.ranks.close(cancel_futures=bool(self.chance.randrange(2)))
            closed.set_result(None)

        self.ranks.submit(total).add_done_callback(close)
        closed.result(LIMIT)
        self.close()

    def destroy_the_group(self) -> None:
        assert self.ranks.run(dist.destroy_process_group) == [None, None]

    def message(self) -> None:
        with pytest.raises(ValueError, match="no such luck"):
            self.ranks.run(send_and_fail)
        self.lose()

    def fork(self) -> None:
        child = os.fork()
        if child == 0:
            signal.alarm(int(LIMIT))
            try:
                self.ranks.run(total)
            except RuntimeError:
                self.ranks.close()
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def use_the_module(self) -> None:
        """Ranks have what they have imported, until they are others or it is reloaded."""
        self.loaded = self.version if self.loaded is None else self.loaded
        assert self.ranks.run(module_value) == [self.loaded] * 2

    def edit(self) -> None:
        self.version += 1
        self.module.write_text(f"VALUE = {self.version}  # {'x' * self.version}\n")  # compiled files know the size
        os.utime(self.module, (self.version, self.version))

    def reload(self) -> None:
        stale = self.loaded not in {None, self.version}
        assert self.ranks.reload() == ([self.module.stem] if stale else [])
        self.loaded = self.version if stale else self.loaded

    def take_a_number(self) -> None:
        """Other code closes a descriptor of the caller's, and opens its own there."""
        name, number = self.chance.choice(
            [(name, fd) for name, fd in launches.descriptors_of(self.ranks).items() if name in VITAL]
        )
        print(name, number)
        with open(os.devnull) as file:
            os.dup2(file.fileno(), number)
        assert self.ranks.run(total) == [2.0, 2.0]
        self.lose()
        os.close(number)

    def some(self) -> list[Held]:
        return [self.chance.choice(list(self.held))] if self.held else []


@pytest.mark.nightly
@pytest.mark.slow
def test_a_random_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    print(f"MLAUNCH_WALK={COUNT} MLAUNCH_WALK_SEED={SEED}")  # which pytest shows if it fails
    walk = Walk(random.Random(SEED), tmp_path / "walked_module.py")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the ranks (were lost between calls|run older code)")
        try:
            for place in range(COUNT):
                print(place, walk.step())
                walk.check()
        finally:
            walk.ranks.terminate()
