"""``map`` and ``grid``: launches for many values, driven by one thread."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import re
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mlaunch
from mlaunch import Sweep, launcher
from tests import launches
from tests.contract.test_submit import hold, holding
from tests.processes import alive, wait_until
from tests.unit.test_output import Place


@launcher(n_gpus=2, concurrent=2)
def times(x: float, y: int = 1, *, folder: Path | None = None) -> float:
    """Fails where there is a file of the name of ``x``, and goes on for as long as there is another."""
    while folder is not None and (folder / f"{x}-goes-on").exists():
        signal.sigtimedwait([], 0.01)
    if folder is not None and (folder / f"{x}-{os.environ['TORCHELASTIC_RESTART_COUNT']}").exists():
        raise ValueError(x)
    return x * y + dist.get_rank()


def test_a_map_and_a_grid() -> None:
    runs = times.map([0.5, 2, 3], [1, 10])  # as the builtin: up to the shortest
    assert {tuple(run.result()) for run in runs.as_completed(120)} == {(0.5, 1.5), (20, 21)}
    assert [run.arguments["y"] for run in runs] == [1, 10]
    assert runs.results() == [[0.5, 1.5], [20, 21]]
    assert runs.table().splitlines()[0].split() == ["x", "y", "state", "seconds", "values"]
    grid = times.grid(x=[1, 2], y=range(2))
    assert grid.results(120) == [[0, 1], [1, 2], [0, 1], [2, 3]]
    rows = grid.rows()
    assert [(row["x"], row["y"]) for row in rows] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert rows[3] == {**rows[3], "folder": None, "state": "returned", "value": 2, "values": [2, 3]}
    assert launches.table_text(grid, 3).splitlines()[-1] == "and 1 more: table() has all"  # type: ignore[arg-type]
    assert "<td>2</td><td>1</td><td>returned</td>" in grid._repr_html_()
    assert len(times.map([])) == 0


@pytest.mark.nightly
@pytest.mark.slow
def test_agents_of_trials_that_have_ended_serve_later_ones() -> None:
    """Ranks are new, and keep the place of their trial."""
    runs = launcher(_who, 2, device_type="cpu", concurrent=2).map(range(24))
    found = [rank for ranks in runs.results(120) for rank in ranks]
    assert len({agent for agent, *_ in found}) < 24
    assert len({rank for _, rank, *_ in found}) == 48
    assert all(held for *_, held in found)


def _who(_number: int) -> tuple[int, int, bool]:
    """Returns agent, rank, and whether this process, too, holds its trial's place."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    held = [os.readlink(link) for link in links if os.path.exists(link)]
    return os.getppid(), os.getpid(), any(Path(path).parent == launches.lease_directory() for path in held)


@pytest.mark.slow
def test_the_first_failure_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "2-0").touch()
    (tmp_path / "3-goes-on").touch()
    runs = times.grid(x=[2, 1, 3], folder=[tmp_path])
    with pytest.raises(ValueError, match="2") as caught:
        runs.results(120)
    assert "of the trial times(x=2, folder=" in str(caught.value.__notes__)
    assert [run.done() for run in runs] == [True] * 3
    assert runs[2].cancelled()
    assert "ValueError: 2" in repr(runs)
    with pytest.raises(ValueError, match="2"):
        list(runs.as_completed(120))
    (tmp_path / "2-0").unlink()
    (tmp_path / "3-goes-on").unlink()
    assert runs.retry().results(120) == [[2, 3], [1, 2], [3, 4]]


@pytest.mark.slow
def test_a_sweep_goes_on_after_failures(tmp_path: Path) -> None:
    for name in ("1-0", "2-0", "2-1"):
        (tmp_path / name).touch()
    runs = times.grid(x=[1, 2, 3], folder=[tmp_path], retries=1, return_exceptions=True)
    first, second, third = runs.results(120)
    assert (first, third) == ([1, 2], [3, 4])
    assert isinstance(second, ValueError)
    assert [run.state for run in runs] == ["returned", "failed", "returned"]


KILLED = """
import os, sys
from mlaunch import launcher

@launcher(n_gpus=1, device_type="cpu", concurrent=1)
def train(lr, seed=0):
    return lr + seed

runs = train.grid(lr=[1, 2, 3], resume="sweep.jsonl")
for run in runs.as_completed():
    print(run.result(), run.report is None)
    if sys.argv[1:] == []:
        sys.stdout.flush()
        os.kill(os.getpid(), 9)
"""


def test_a_sweep_goes_on_where_it_was_killed(run_script: Callable[[str], CompletedProcess[str]]) -> None:
    assert run_script(KILLED).stdout == "[1] False\n"
    first, *others = run_script(KILLED.replace("== []", "== [0]")).stdout.splitlines()
    assert first == "[1] True"
    assert others in (["[2] False", "[3] False"], ["[2] True", "[3] False"])  # as it was killed, the second had begun


@pytest.mark.slow
def test_a_trial_that_is_done_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "2-0").touch()
    grid = {"x": [1, 2], "folder": [tmp_path], "return_exceptions": True, "resume": tmp_path / "sweep.jsonl"}
    runs = times.grid(**grid)
    with pytest.raises(ValueError, match="another sweep has it"):
        times.grid(**grid)
    runs.results(120)
    (tmp_path / "2-0").unlink()
    again = times.grid(**grid)
    assert again.results(120) == [[1, 2], [2, 3]]
    assert [run.report is None for run in again] == [True, False]
    assert again[0].arguments == {"x": 1, "y": 1, "folder": tmp_path}
    assert [row["seconds"] > 0 for row in again.rows()] == [True, True]
    with pytest.raises(TypeError, match="resume= with x=, a function, which has no form"):
        times.map([hold], resume=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_retry_that_cannot_open_its_file_changes_nothing_and_one_in_a_loop_is_of_that_loop(tmp_path: Path) -> None:
    for name in ("1-0", "2-0"):
        (tmp_path / name).touch()
    file = tmp_path / "sweep.jsonl"
    runs = times.options(n_gpus=1).grid(x=[1, 2, 3], folder=[tmp_path], resume=file, return_exceptions=True)
    failures = runs.results(120)
    assert [str(one) for one in failures] == ["1", "2", "[3]"]
    with open(file, "r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for _ in range(2):
            with pytest.raises(ValueError, match="another sweep has it"):
                runs.retry()
        assert [run.state for run in runs] == ["failed", "failed", "returned"]
        assert runs.results(120) == failures
    yielded = []
    for run in runs.as_completed(120):
        yielded.append(run)
        if run.exception() is not None:
            (tmp_path / "2-0").unlink(missing_ok=True)
            (tmp_path / "1-0").unlink(missing_ok=True)
            assert runs.retry() is runs
    assert {*runs} <= {*yielded}
    assert runs.results(120) == [[1], [2], [3]]


def test_repeats_have_each_their_own_values(tmp_path: Path) -> None:
    """Also where the sweep was ended after one of them, and where one more is wanted."""
    repeat, file = launcher(os.urandom, 1, concurrent=2), tmp_path / "sweep.jsonl"
    first = repeat.map([4] * 2, resume=file).results(120)
    found = repeat.map([4] * 3, resume=file)
    assert found.results(120)[:2] == first
    assert len({value for (value,) in found.results()}) == 3
    assert [run.report is None for run in found] == [True, True, False]


def ranks_of(runs: Sweep, folder: Path) -> list[int]:
    """Waits until the first trial holds and the second waits; returns the ranks of the first."""
    pids = holding(folder, "first")
    wait_until(lambda: len(launches.leases()[1]) == 1)
    assert [run.state for run in runs] == ["running", "waiting", "waiting"]
    return pids


def various(kind: str, loss: float) -> object:
    mlaunch.report(1, loss=loss, kind=kind)
    return {"dict": {"acc": 0.5, "loss": 1.0, "state": "x"}, "tensor": torch.tensor(2.5)}[kind]


def test_rows_have_a_column_for_each_thing_that_was_reported_or_returned() -> None:
    """Numbers, so that a table can be computed with; a name that is there has "_" behind it."""
    runs = launcher(various, 1, concurrent=2).map(["dict", "tensor"], [2.0, 3.0])
    runs.results(120)
    first, second = runs.rows()
    names = ["kind", "loss", "state", "seconds", "step", "loss_", "kind_", "acc", "loss__", "state_", "values"]
    assert list(first) == names
    assert (first["loss"], first["loss_"], first["loss__"], first["state_"]) == (2.0, 2.0, 1.0, "x")
    assert (type(second["value"]), second["value"]) == (float, 2.5)


def in_a_fork(runs: Sweep, folder: Path) -> bool:
    """True if it leaves its parent's runs alone, and makes calls of its own."""
    own = launcher(int, n_gpus=1, concurrent=1).submit(7)
    gc.collect()
    for refused in (runs.results, runs.cancel, runs.retry, runs[0].result, runs[1].cancel, runs[1].stop):
        with pytest.raises(
            RuntimeError, match=f"by process {os.getppid()}; this process is a fork of it: call it there"
        ):
            refused()
    (folder / "refused").touch()
    return runs[0].state == "running" and own.result(120) == [7]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_fork_beside_a_sweep(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As a data loader makes one: it says nothing, holds nothing of the sweep's, and waits for nobody in its parent."""
    given: dict[str, Any] = {"folder": [tmp_path], "name": ["first", "second"], "resume": tmp_path / "sweep.jsonl"}
    runs = launcher(hold, n_gpus=1, concurrent=1).grid(**given)
    wait_until(lambda: [run.state for run in runs] == ["running", "waiting"] and [*tmp_path.glob("first-*")])
    wait_until(lambda: launches.leases()[1])
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            os.close(writer)
            signal.alarm(120)
            found = in_a_fork(runs, tmp_path)
            os.read(reader, 1)
            os._exit(0 if found else 1)
        os._exit(2)
    os.close(reader)
    wait_until((tmp_path / "refused").exists)
    for name in ("first", "second"):
        wait_until(lambda name=name: list(tmp_path.glob(f"{name}-*")))  # type: ignore[misc]
        for mark in tmp_path.glob(f"{name}-*"):
            mark.unlink()
    assert runs.results(120) == [["first"], ["second"]]
    assert launcher(hold, n_gpus=1, concurrent=1).grid(**given).results(120) == runs.results()
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert capfd.readouterr().err == ""


INTERRUPTED = "the trials of hold() were interrupted; 0 of 3 had returned, and their values stay"


@pytest.mark.parametrize(
    ("waits", "told"),
    [
        (lambda runs: runs[2].result(120), []),
        (lambda runs: runs.results(120), [INTERRUPTED]),
        (lambda runs: next(runs.as_completed(120)), [INTERRUPTED]),
    ],
)
def test_an_interrupt_ends_all(tmp_path: Path, waits: Callable[[Sweep], object], told: list[str]) -> None:
    file = tmp_path / "sweep.jsonl" if told else None
    runs = launcher(hold, n_gpus=2, concurrent=1).map([tmp_path] * 3, ["first", "second", "third"], resume=file)
    pids: list[int] = []

    def interrupt() -> None:
        pids.extend(ranks_of(runs, tmp_path))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    with pytest.raises(KeyboardInterrupt) as interrupted:
        waits(runs)
    sender.join()
    there = f" in {file}: the same line of code, run again, continues from there"
    assert getattr(interrupted.value, "__notes__", []) == [one + there for one in told]
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(interrupted.value.__traceback__)]
    assert len([file for file in files if file != __file__]) <= 1  # as of a call
    assert len(pids) == 2
    assert not any(map(alive, pids))
    assert [run.state for run in runs] == ["cancelled"] * 3


def say(folder: Path, name: str) -> None:
    mlaunch.report(3, loss=0.25)
    print("hello")
    hold(folder, name)


@pytest.mark.slow
def test_lines_of_trials_and_how_far_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place()
    launches.show_sweeps_at(monkeypatch, lambda **_: place)
    runs = launcher(say, n_gpus=2, concurrent=2).map([tmp_path] * 3, ["first", "second", "third"])
    expected = [
        "name='first': say()  0:00  running, step 3, loss 0.25",
        "name='second': say()  0:00  running, step 3, loss 0.25",
        "say: 0 of 3 done, 2 running, 1 waiting",
    ]
    pattern = "\n".join(map(re.escape, expected)).replace("0:00", r"\d:\d\d")
    wait_until(lambda: any(re.match(pattern, text) for text in place.shown))
    titles = [launches.title_of(launch) for launch in launches.ask("status")]
    assert all(any(f"name={name!r})  2 ranks" in title for title in titles) for name in ("first", "second"))
    for name in ("first", "second", "third"):
        for pid in holding(tmp_path, name):
            (tmp_path / f"{name}-{pid}").unlink()
    runs.results(120)
    assert re.fullmatch(r"say: 3 of 3 done  \d:\d\d", (place.left or [""])[0])
    found = {line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()}
    assert found == {"[name='first'", "[name='second'", "[name='third'"}


@pytest.mark.slow
def test_a_cancelled_trial_lets_the_next_begin(tmp_path: Path) -> None:
    runs = launcher(hold, n_gpus=2, concurrent=1).map([tmp_path] * 3, ["first", "second", "third"])
    ranks_of(runs, tmp_path)
    assert runs[1].cancel()
    assert runs[0].cancel()
    with pytest.raises(TimeoutError, match="1 of 3 trials have not ended"):
        runs.results(0)
    for pid in holding(tmp_path, "third"):
        (tmp_path / f"third-{pid}").unlink()
    assert runs[2].result(120) == ["third", "third"]


def test_a_wrong_sweep_is_raised_where_it_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"grid\(y=\[\]\): there is nothing to combine"):
        times.grid(x=[1], y=[])
    with pytest.raises(TypeError, match=r"grid\(x='adam'\): allowed: the values to try, x=\['adam'\]"):
        times.grid(x="adam")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        times.grid(y=[1])
    with pytest.raises(TypeError, match="without values; allowed: an iterable"):
        times.map()
    with pytest.raises(TypeError, match="with the parameter 'devices', which is an option of grid"):
        launcher(lambda devices: devices).grid(devices=[[1]])
    with pytest.raises(ValueError, match=r"devices=\[0, 0\]: allowed: at least one device, each once"):
        times.map([1], devices=[0, 0])
    with pytest.raises(ValueError, match=r"n_gpus=2 with devices=\[0\]: allowed"):
        times.map([1], devices=[0])
    with pytest.raises(TypeError, match=r"times.map\(3\): allowed: an iterable of values for each argument, \[3\]"):
        times.map(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="retries=-1: allowed: whole numbers from 0"):
        times.map([1], retries=-1)
    for resume, kind in (("", ValueError), (3, TypeError)):
        with pytest.raises(kind, match=f"resume={resume!r}: allowed: the path of a file, or None"):
            times.map([1], resume=resume)  # type: ignore[arg-type]
    for words, environ in (("cannot be made or opened", "/proc/nothing"), ("must belong to this user", "/tmp")):
        monkeypatch.setenv("MLAUNCH_LEASE_DIR", environ)
        with pytest.raises(OSError, match=words):
            times.map([1]).results(120)
    with pytest.raises(ValueError, match=r"devices=.*: ranks on CPUs have no device numbers; give n_gpus=2 instead"):
        launcher(int, n_gpus=2, devices=range(8), device_type="cpu")()
