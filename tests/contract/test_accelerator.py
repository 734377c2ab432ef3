"""Launches on an accelerator without hardware (``tests/toy.py``). Those on real ones are in ``test_gpu.py``."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mlaunch import LaunchError, Ranks, comm, device, get_backend, get_local_device_id, launcher, warm_up
from tests import launches, toy
from tests.conftest import ROOT
from tests.contract.preparing import pids_of, prepared, preparing
from tests.system.commands import FRESH, run, write

pytestmark = pytest.mark.skipif(not toy.is_possible(), reason="this torch takes no accelerator written in Python")

Runner = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    toy.install(folder)
    return folder


@pytest.fixture(scope="module")
def caller(folder: Path) -> Iterator[Runner]:
    """Runs functions of this module in a process whose torch has the accelerator."""
    sys.path.append(str(folder))  # which a process that is spawned has, too; torch here is imported already
    os.environ["TOY_LOG"] = str(folder / "log")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(begin).result(120)
        sys.path.remove(str(folder))
        del os.environ["TOY_LOG"]
        yield lambda function, *args: pool.submit(function, *args).result(120)


def begin() -> None:
    """Starts the fork server, so that no test is told of another process than before."""
    launcher(device, 1)()


def where() -> tuple[str, int, str]:
    return str(device()), torch.accelerator.current_device_index(), os.environ["LOCAL_RANK"]


def on(**options: Any) -> list[tuple[str, int, str]]:
    return launcher(where).options(**options)()


def call(options: dict[str, Any]) -> list[tuple[str, int, str]]:
    return on(**options)


# Which devices


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({}, [("toy:0", 0, "0"), ("toy:1", 1, "1")]),
        ({"device_type": "toy"}, [("toy:0", 0, "0"), ("toy:1", 1, "1")]),
        ({"n_gpus": 1}, [("toy:0", 0, "0")]),
        ({"devices": [1]}, [("toy:1", 1, "0")]),
        ({"devices": [1, 0]}, [("toy:1", 1, "0"), ("toy:0", 0, "1")]),
        ({"devices": [1], "backend": "cpu:gloo,toy:gloo"}, [("toy:1", 1, "0")]),
        ({"device_type": "cpu", "n_gpus": 1}, [("cpu", 0, "0")]),
        ({"env": {"TOY_DEVICES": "3"}, "devices": [2]}, [("toy:2", 2, "0")]),
        ({"env": {"TOY_DEVICES": "0"}, "n_gpus": 2}, [("cpu", 0, "0"), ("cpu", 0, "1")]),
    ],
)
def test_which_devices_ranks_are_on(
    caller: Runner, options: dict[str, Any], places: list[tuple[str, int, str]]
) -> None:
    assert caller(call, options) == places


def bound() -> str:
    return str(dist.group.WORLD.bound_device_id)


def bound_on(backend: str) -> list[str]:
    return launcher(bound, 1, backend=backend)()


def test_a_group_of_gloo_is_bound_to_no_device(caller: Runner) -> None:
    """Else torch splits each later group off it, and one with NCCL raises TypeError (torch 2.11, on an H200)."""
    assert caller(bound_on, "gloo") == caller(bound_on, "cpu:gloo,toy:gloo") == ["None"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_gpus": 3}, r"n_gpus=3: only 2 toy device\(s\) are visible here; allowed: 1 to 2, or device_type='cpu'"),
        (
            {"devices": [0, 2]},
            r"devices=\[0, 2\]: \[2\] do not exist; the 2 visible toy device\(s\) are numbered 0 to 1",
        ),
        ({"device_type": "toy", "n_gpus": 1, "env": {"TOY_DEVICES": "0"}}, r"only 0 toy device\(s\) are visible here"),
        ({"device_type": "cuda"}, r"torch .* is built for toy and CPUs only; allowed: 'auto', 'toy', 'cpu'"),
        ({"device_type": "cpu", "devices": [1]}, r"devices=\[1\]: ranks on CPUs have no device numbers"),
    ],
)
def test_devices_that_are_not_there(caller: Runner, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        caller(call, options)


def collectives() -> tuple[float, str | None, int, list[int]]:
    value = torch.ones(1)
    dist.all_reduce(value)
    dist.barrier()
    comm.synchronize()
    comm.synchronize(timeout=60)
    return value.item(), get_backend(), get_local_device_id(), comm.all_gather(dist.get_rank())


def communicate(backend: str | None) -> list[tuple[float, str | None, int, list[int]]]:
    return launcher(collectives, backend=backend)()


@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo"])
def test_groups_of_ranks_on_a_device_that_has_no_backend_of_its_own(caller: Runner, backend: str | None) -> None:
    assert caller(communicate, backend) == [(2.0, "gloo", rank, [0, 1]) for rank in range(2)]


# What wakes a device, and when


def counts_of(deed: str) -> tuple[set[int], set[int]]:
    """The processes that did it in a launch; this one and its fork server."""
    log = Path(os.environ["TOY_LOG"])
    log.write_text("")
    on()
    lines = [line.split(maxsplit=1) for line in log.read_text().splitlines()]
    return {int(pid) for pid, done in lines if done == deed}, {os.getpid(), launches.server_pid()}


def test_devices_are_counted_neither_in_the_caller_nor_in_the_fork_server(caller: Runner) -> None:
    counted, ours = caller(counts_of, "counts")
    assert counted
    assert not counted & ours


def test_ranks_alone_wait_for_devices(caller: Runner) -> None:
    waited, ours = caller(counts_of, "waits")
    assert len(waited) == 2
    assert not waited & ours


def launch_after_initialisation() -> tuple[str, list[tuple[str, int, str]]]:
    module: Any = torch.get_device_module("toy")
    module.set_device(1)
    try:
        with pytest.raises(RuntimeError) as refused:
            on(n_gpus=1, start_method="fork")
        return str(refused.value), on(n_gpus=1)
    finally:
        module._initialised = False


def test_a_caller_that_has_initialised_a_device_is_not_forked(caller: Runner) -> None:
    words, places = caller(launch_after_initialisation)
    assert words.startswith("start_method='fork': this process has initialised toy, and a fork of it could not use the")
    assert places == [("toy:0", 0, "0")]


def test_before_that_it_may_be_forked(caller: Runner) -> None:
    assert caller(call, {"start_method": "fork"}) == [("toy:0", 0, "0"), ("toy:1", 1, "1")]


# Failures


def failure_of(function: Callable[[], object], options: dict[str, Any]) -> str:
    with pytest.raises((LaunchError, RuntimeError)) as caught:
        launcher(function).options(**options)()
    return str(caught.value if isinstance(caught.value, LaunchError) else caught.value.__cause__)


def raises() -> None:
    raise RuntimeError("boo")


def dies() -> None:
    os._exit(7)


def test_a_failure_names_the_device(caller: Runner) -> None:
    text = caller(failure_of, raises, {"devices": [1]})
    assert text.startswith("rank 0 of raises() raised RuntimeError: boo\n")
    assert ", toy:1, pid " in text.splitlines()[1]
    assert ", toy:1, pid " in caller(failure_of, dies, {"devices": [1]}).splitlines()[1]


def test_an_error_of_queued_work_belongs_to_the_function(caller: Runner) -> None:
    text = caller(failure_of, device, {"devices": [1], "env": {"TOY_FAILS": "an illegal access"}})
    assert text.startswith("rank 0 of device() raised RuntimeError: an illegal access\n")
    assert "while running the function" in text.splitlines()[1]


# Ranks that stay


def counting(state: list[int]) -> tuple[list[int], str, int]:
    state.append(len(state))
    return state, str(device()), torch.accelerator.current_device_index()


def fail_together() -> None:
    raise ValueError("both")


def stay() -> list[Any]:
    found: list[Any] = []
    with Ranks(devices=[1, 0]) as ranks:
        state = ranks.hold(list)
        found.append(ranks.run(counting, state))
        with pytest.raises(ValueError, match="both"):
            ranks.run(fail_together)
        found.append(ranks.run(counting, state))
        found.append(ranks.devices)
    return found


def test_ranks_that_stay_keep_their_devices(caller: Runner) -> None:
    first, second, devices = caller(stay)
    assert first == [([0], "toy:1", 1), ([0], "toy:0", 0)]
    assert second == [([0, 1], "toy:1", 1), ([0, 1], "toy:0", 0)]
    assert list(devices) == ["toy:1", "toy:0"]


# Ranks of others, and commands


def test_a_rank_that_joins_takes_its_device(folder: Path, tmp_path: Path) -> None:
    script = write(tmp_path, """
import mlaunch, torch
mlaunch.join_from_env(verbose=False)
print(mlaunch.device(), torch.accelerator.current_device_index(), mlaunch.get_backend())
""")  # fmt: skip
    path = os.pathsep.join([str(ROOT), str(folder)])
    done = run(tmp_path, "--nproc-per-node", "gpu", script, command=FRESH, PYTHONPATH=path)
    assert sorted(done.stdout.splitlines()) == ["toy:0 0 gloo", "toy:1 1 gloo"], done.stderr


def test_a_command_cannot_pick_devices_that_no_variable_hides(folder: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(folder)])
    done = run(tmp_path, "--devices", "1", write(tmp_path, ""), command=FRESH, PYTHONPATH=path)
    assert done.returncode == 2
    assert "--devices=[1]: commands see all toy devices, since no variable hides them" in done.stderr


# What is imported once

WAKES = "import torch; torch.accelerator.set_device_index(0)"


def after_warm_up(folder: Path) -> str:
    """Returns what a call says after a preload that wakes the driver; the process is as before then."""
    sys.path.insert(0, str(folder))
    try:
        warm_up(preload=["wakes_a_driver"])
        launcher(device)()
    except LaunchError as error:
        return str(error)
    finally:
        sys.path.remove(str(folder))
        warm_up(preload=[])
        launcher(device)()
    return ""


WHY = "cannot preload wakes_a_driver: its import wakes the driver of toy, which no fork of this process could use"


@pytest.mark.slow
def test_a_preload_that_wakes_the_driver_is_refused(caller: Runner, tmp_path: Path) -> None:
    write(tmp_path, WAKES, "wakes_a_driver.py")
    assert WHY in caller(after_warm_up, tmp_path)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_preload_of_a_command_that_wakes_the_driver_is_refused(folder: Path, tmp_path: Path) -> None:
    write(tmp_path, WAKES, "wakes_a_driver.py")
    path = os.pathsep.join([str(ROOT), str(folder), str(tmp_path)])
    done = run(tmp_path, "--preload", "wakes_a_driver", write(tmp_path, ""), command=FRESH, PYTHONPATH=path)
    assert (done.returncode, WHY in done.stderr) == (1, True), done.stderr


# What is prepared


def deeds(of: list[int]) -> list[list[str]]:
    lines = [line.split(maxsplit=1) for line in Path(os.environ["TOY_LOG"]).read_text().splitlines()]
    return [[deed for pid, deed in lines if int(pid) == rank] for rank in of]


def on_prepared_ranks() -> tuple[list[list[str]], list[list[str]], bool]:
    with preparing():
        launcher(os.getpid)()
        ranks = pids_of(prepared())
        before = deeds(ranks)
        taken = launcher(os.getpid)() == ranks
        return before, deeds(ranks), taken


def test_ranks_that_are_prepared_touch_no_device_before_their_call(caller: Runner) -> None:
    before, after, taken = caller(on_prepared_ranks)
    assert (before, taken) == ([[], []], True)
    assert [rank[0] for rank in after] == ["takes 0", "takes 1"]


def both_at_once(folder: Path) -> list[list[str]]:
    """Makes two calls that each wait until the other runs, too."""

    def meet(name: str) -> str:
        (folder / name).touch()
        while len(list(folder.iterdir())) < 2:
            signal.sigtimedwait([], 0.01)
        return f"{device()} {os.environ['MLAUNCH_LEASED'].removeprefix('toy:')}"

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(launcher(meet, devices=range(2), n_gpus=1), "ab"))


def test_each_launch_has_a_device_that_no_other_has(caller: Runner, tmp_path: Path) -> None:
    assert sorted(caller(both_at_once, tmp_path)) == [["toy:0 0"], ["toy:1 1"]]
    with pytest.raises(ValueError, match=r"devices=\[1, 2\]: \[2\] do not exist"):
        caller(on_leased, [1, 2])
    with pytest.raises(ValueError, match="concurrent=2 on toy devices: the number of devices limits how many"):
        caller(on_leased, None)


def on_leased(devices: list[int] | None) -> object:
    return on(devices=devices, n_gpus=1, concurrent=None if devices else 2)
