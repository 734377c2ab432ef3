"""Decorated functions whose ranks stay."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mlaunch
from mlaunch import LaunchError, Ranks, launcher
from tests import builds, launches, toy
from tests.contract.test_lease_calls import held
from tests.contract.test_submit import hold, holding
from tests.processes import alive, wait_gone, wait_until


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    launches.end_sets_that_stay(at_once=True)  # also with a call that a failed test has left


def pids() -> int:
    return os.getpid()


train = launcher(pids, n_gpus=2, keep=600)


@pytest.mark.slow
def test_equal_options_share_ranks() -> None:
    other = launcher(lambda x: (x, os.getpid()), n_gpus=2, keep=600)
    first = train()
    assert train() == first
    assert other(3) == [(3, pid) for pid in first]
    assert train.options(deadline=60)() == first  # which is of a call
    assert train.options(n_gpus=1)()[0] not in first
    assert train() == first
    assert len(train.history) >= 3


def test_the_latest_call_says_how_long_they_stay() -> None:
    def limits() -> list[float | None]:
        return [launches.idle_timeout(ranks) for ranks in launches.sets_that_stay().values()]

    first = train()
    assert 500.0 not in limits()
    assert train.options(keep=500.0)() == first
    assert 500.0 in limits()
    assert train() == first
    assert 500.0 not in limits()


@pytest.mark.slow
def test_a_changed_environment_replaces_them(monkeypatch: pytest.MonkeyPatch) -> None:
    first = train()
    monkeypatch.setenv("KEPT_TEST", "7")
    assert launcher(lambda: os.environ["KEPT_TEST"], n_gpus=2, keep=600)() == ["7", "7"]
    assert not set(train()) & set(first)
    assert not any(map(alive, first))


@pytest.mark.slow
def test_a_changed_directory_replaces_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train()
    monkeypatch.chdir(tmp_path)
    assert launcher(os.getcwd, n_gpus=2, keep=600)() == [str(tmp_path)] * 2
    assert not set(train()) & set(first)
    assert not any(map(alive, first))


def wait_for(path: str) -> int:
    wait_until(lambda: os.path.exists(path))
    return os.getpid()


@pytest.mark.slow
def test_a_set_that_is_replaced_while_its_call_runs_blocks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, found = tmp_path / "gate", dict[str, list[int]]()
    busy = launcher(wait_for, n_gpus=1, keep=600)
    others, mine = train(), busy(__file__)

    def call(name: str, path: str) -> None:
        found[name] = busy(path)

    with ThreadPoolExecutor(2) as pool:
        old = pool.submit(call, "old", str(gate))
        [ranks] = [ranks for key, ranks in launches.sets_that_stay().items() if key != only_key(others)]
        wait_until(lambda: not ranks.idle)
        monkeypatch.setenv("KEPT_TEST", "8")
        new = pool.submit(call, "new", __file__)
        wait_until(lambda: bool(launches.sets_that_leave()))
        monkeypatch.delenv("KEPT_TEST")
        assert train() == others
        assert launcher(pids, n_gpus=2, keep=600, timeout=77)()  # which are to be started
        gate.touch()
        old.result(60)
        new.result(60)
    assert found["old"] == mine != found["new"]
    assert not launches.sets_that_leave()


def only_key(pids: list[int]) -> str:
    """The key of the set of two ranks."""
    [key] = [key for key, ranks in launches.sets_that_stay().items() if ranks.world_size == len(pids)]
    return key


@pytest.mark.nightly
@pytest.mark.slow
def test_a_fork_made_while_locks_are_taken_is_free_to_call() -> None:
    train()
    with launches.lock_of_sets():
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(0 if len(set(train())) == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    train()


def test_a_seed_counts_for_each_call() -> None:
    draw = launcher(lambda: torch.rand(1).item(), n_gpus=2, keep=600, seed=5)
    assert draw() == draw()
    assert draw.options(seed=6)() != draw()


@pytest.mark.slow
def test_restarts_get_fresh_ranks(tmp_path: Path) -> None:
    def work(path: str) -> int:
        if dist.get_rank() == 1 and not os.path.exists(path):
            Path(path).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return os.getpid()

    first = train()
    with pytest.warns(RuntimeWarning, match="is started again"):
        found = launcher(work, n_gpus=2, keep=600, max_restarts=2)(str(tmp_path / "tried"))
    assert not set(found) & set(first)
    assert train() == found


@pytest.mark.slow
def test_kept_ranks_end_when_nobody_calls() -> None:
    brief = launcher(pids, n_gpus=2, keep=0.05)
    first = brief()
    wait_gone(first)
    assert not set(brief()) & set(first)


@pytest.mark.slow
def test_a_set_that_has_ended_leaves_nothing_here() -> None:
    """By ``keep``, or with a call: a sweep with a variable of its own for each trial has thousands."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def there() -> set[int]:
        return {id(found) for found in gc.get_objects() if type(found) is Ranks}

    before = there()  # of tests that ran earlier in this process
    for number in range(3):
        launcher(pids, n_gpus=1, keep=0.01, env={"TRIAL": f"{number}"})()
    for number in range(2):
        with pytest.raises(LaunchError):
            launcher(die, n_gpus=1, keep=600, env={"DEAD": f"{number}"})()
    wait_until(lambda: not launches.sets_that_stay())
    gc.collect()
    assert there() <= before
    assert not launches.sets_being_made()


def test_a_set_that_ends_as_a_call_comes_is_replaced() -> None:
    kept = train.options(n_gpus=1)
    first = kept()
    (found,) = (ranks for ranks in launches.sets_that_stay().values() if ranks.world_size == 1)
    launches.evict(found)  # as idle ones end
    assert found.closed
    assert found not in launches.sets_that_stay().values()
    assert kept() != first


def test_an_exception_leaves_them() -> None:
    first = train()
    with pytest.raises(ZeroDivisionError):
        launcher(lambda: 1 / 0, n_gpus=2, keep=600)()
    assert train() == first


def test_a_fork_of_the_caller_gets_its_own() -> None:
    first = train()
    assert first == train()
    child = os.fork()
    if child == 0:
        os._exit(0 if not launches.sets_that_stay() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert train() == first


def test_given_ranks_are_used() -> None:
    with Ranks(n_gpus=2) as ranks:
        assert launcher(pids, n_gpus=1).options(ranks=ranks)() == ranks.run(pids)
        assert launches.sets_that_stay() == {}


KEEPING = """
import os
from mlaunch import launcher

@launcher(n_gpus=2, keep=600)
def train():
    return os.getpid()

print(*train())
"""


@builds.silent
def test_the_end_of_the_interpreter_leaves_nothing(run_script) -> None:  # type: ignore[no-untyped-def]
    done = run_script(KEEPING)
    assert (done.returncode, done.stderr) == (0, "")
    assert not any(alive(int(pid)) for pid in done.stdout.split())


RIVALS = """
import os

os.environ.update(PYTHONPATH=os.pathsep.join([os.getcwd(), os.environ["PYTHONPATH"]]), TOY_DEVICES="3")
from mlaunch import device, launcher
from tests.processes import alive

@launcher(keep=600)
def where():
    import torch
    return os.getpid(), str(device()), torch.accelerator.current_device_index()

first, second, both = (where.options(devices=devices) for devices in ([0], [2], [2, 1]))
cpus = where.options(device_type="cpu", n_gpus=1)
[(one, *place)], [(other, *other_place)], [(cpu, *_)] = first(), second(), cpus()
assert place == ["toy:0", 0] and other_place == ["toy:2", 2], (place, other_place)
assert first()[0][0] == one and second()[0][0] == other  # on different devices they stay
(new, *new_place), (newer, *newer_place) = both()
assert new_place == ["toy:2", 2] and newer_place == ["toy:1", 1], (new_place, newer_place)
assert not alive(other)  # it was idle, and ended before
assert first()[0][0] == one and cpus()[0][0] == cpu
assert where.options(n_gpus=1, seed=3)()[0][0] == where.options(n_gpus=1)()[0][0] != one  # which is device 0
assert not alive(one) and alive(new) and alive(newer)
assert where()[0][0] != new  # on all
assert not alive(new) and not alive(newer) and alive(cpu)
print("done")
"""


def test_of_two_sets_that_want_the_same_devices_the_idle_one_ends_first(run_script, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    if not toy.is_possible():
        pytest.skip("torch of this version takes no accelerator that is written in Python")
    toy.install(tmp_path)
    done = run_script(RIVALS, fresh=True)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def hold_or_say(folder: Path | None) -> tuple[str, int]:
    """Says which place it has, and who it is; holds while it is to."""
    if folder is not None:
        hold(folder)
    return os.environ["MLAUNCH_LEASED"], os.getpid()


def test_trials_take_the_warm_ranks_of_their_devices() -> None:
    say = launcher(hold_or_say, n_gpus=2, keep=600, concurrent=2)
    places: dict[str, set[int]] = {}
    for values in say.map([None] * 8).results(120):
        for place, pid in values:
            places.setdefault(place, set()).add(pid)
    assert places.keys() <= {"place on the CPUs 0", "place on the CPUs 1"}
    assert {len(pids) for pids in places.values()} == {2}  # the same in all trials of a place
    (place, first), (other, second) = say(None)
    assert place == other == "place on the CPUs 0"
    assert {first, second} == places[place]
    assert held() == []  # the lease has ended, although the ranks stay


def test_a_trial_on_ranks_that_stay_is_cancelled_and_they_stay(tmp_path: Path) -> None:
    say = launcher(hold_or_say, n_gpus=2, keep=600, concurrent=1)
    before = say(None)
    runs = say.map([tmp_path, None])
    pids = holding(tmp_path, "begun")
    wait_until(lambda: [run.state for run in runs] == ["running", "waiting"])
    assert runs[0].cancel()
    assert runs[0].cancelled()
    assert runs[1].result(120) == before
    assert {pid for _, pid in before} == {*pids}
    assert runs[1].report is not None


def steps_until_stopped(folder: Path) -> tuple[int, str]:
    (folder / str(dist.get_rank())).touch()
    return next((step, reason) for step in itertools.count() if (reason := mlaunch.stopping()))


def test_a_trial_on_ranks_that_stay_is_asked_to_stop(tmp_path: Path) -> None:
    run = launcher(steps_until_stopped, n_gpus=2, keep=600, lease=True, concurrent=1).submit(tmp_path)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    run.stop("pruned")
    first, second = run.result(120)
    assert first == second
    assert first[1] == "pruned"
    with pytest.raises(ValueError, match="no such luck"):
        launcher(fail, n_gpus=2, keep=600, concurrent=1).submit().result(120)


def say_or_die(dies: bool) -> tuple[str, int]:
    if dies and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if dies:
        dist.barrier()
    return os.environ["MLAUNCH_LEASED"], os.getpid()


def pids_by_place(found: list[Any]) -> dict[str, set[int]]:
    places: dict[str, set[int]] = {}
    for values in found:
        for place, pid in values:
            places.setdefault(place, set()).add(pid)
    return places


@pytest.mark.slow
def test_a_trial_whose_rank_dies_costs_its_own_ranks_alone() -> None:
    call = launcher(say_or_die, n_gpus=2, keep=600, concurrent=2)
    before = pids_by_place(call.map([False] * 8).results(120))
    found = call.map([True, False, False], return_exceptions=True).results(120)
    assert isinstance(found[0], LaunchError)
    assert "was killed by SIGKILL" in str(found[0])
    after = pids_by_place([*found[1:], *call.map([False] * 8).results(120)])
    (changed,) = [place for place in before if before[place] != after[place]]  # the other place's are the same
    assert before[changed].isdisjoint(after[changed])
    assert {len(pids) for pids in after.values()} == {2}


def tell(count: int, folder: Path) -> int:
    for step in range(count):
        mlaunch.report(step, loss=count / (step + 1))
    (folder / f"{count}-{dist.get_rank()}").touch()
    while (folder / f"{count}-goes-on").exists():
        signal.sigtimedwait([], 0.01)
    return count


def shows_tell(stacks: Any) -> bool:
    places = sorted(stacks) == [0, 1] and all(stack.endswith(" in tell") for stack in stacks.values())
    innermost = [frames[0][2] for frames in stacks.frames.values()]
    return places and innermost == ["tell"] * 2 and str(stacks).startswith("  ranks 0-1: running the function, in tell")


def test_a_run_on_ranks_that_stay_is_looked_at(tmp_path: Path) -> None:
    """What it has reported is its own, though the ranks have reported before."""
    call = launcher(tell, n_gpus=2, keep=600, concurrent=1)
    told: list[float] = []
    (tmp_path / "3-goes-on").touch()
    runs = call.map([2, 3, 1], [tmp_path] * 3)
    runs[1].on_report(lambda report: told.append(float(report["loss"] or 0)))
    try:
        assert runs[0].result(120) == [2, 2]
        wait_until(lambda: (tmp_path / "3-0").exists() and (tmp_path / "3-1").exists())
        assert sorted(report["loss"] for report in runs[0].reports) == [1, 1, 2, 2]
        wait_until(lambda: len(runs[1].reports) == 6)
        assert sorted(report["loss"] for report in runs[1].reports) == [1, 1, 1.5, 1.5, 3, 3]
        wait_until(lambda: shows_tell(runs[1].stacks()))  # a moment ago they may have been below it, in pathlib
        assert runs[1].why()
    finally:
        (tmp_path / "3-goes-on").unlink()
    assert runs.results(120) == [[2, 2], [3, 3], [1, 1]]
    assert [len(run.reports) for run in runs] == [4, 6, 2]
    assert sorted(told) == [1, 1, 1.5, 1.5, 3, 3]
    assert runs[1].stacks() == {}


def fail() -> None:
    raise ValueError("no such luck")
