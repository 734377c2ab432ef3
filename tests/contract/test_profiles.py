"""``profile=``: some steps of some ranks, in one file."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mlaunch
from mlaunch import LaunchError, Ranks, launcher
from tests import launches
from tests.contract.test_engine_calls import Threads
from tests.processes import wait_until
from tests.system.commands import run, write

pytestmark = pytest.mark.usefixtures("the_next_call_works")


@pytest.fixture(scope="module", autouse=True)
def preloading() -> Iterator[None]:
    """The fork server imports once what each rank would, for a second, as its profiler starts."""
    mlaunch.warm_up(preload=["torch._inductor"])
    yield
    mlaunch.warm_up(preload=[])


def train(steps: int = 6) -> int:
    for _ in mlaunch.progress(range(steps)):
        dist.all_reduce(torch.ones(8))
    return dist.get_rank()


def train_by_hand() -> None:
    for _ in mlaunch.progress(range(4)):
        for _ in range(2):
            torch.ones(8).sum()
            mlaunch.step()


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def steps_of(events: list[dict[str, Any]]) -> dict[int, list[str]]:
    """The steps that stand there, by rank."""
    found: dict[int, list[str]] = {}
    for event in events:
        if event["name"].startswith("ProfilerStep#") and event.get("cat") == "user_annotation":
            found.setdefault(event["pid"] // 1000 - 1, []).append(event["name"].partition("#")[2])
    return found


@pytest.mark.slow
def test_a_track_for_each_rank_and_one_beginning(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    ours = launcher(train, 2, profile=path, profile_steps=(2, 4))
    assert ours() == [0, 1]
    events = read(path)
    assert steps_of(events) == {0: ["2", "3"], 1: ["2", "3"]}
    assert sum("all_reduce" in event["name"] for event in events) >= 4
    spans = {(event["pid"], event["name"]): event for event in events if event.get("cat") == "mlaunch"}
    for event in events:
        if event["name"].startswith("ProfilerStep#"):
            run = spans[event["pid"] // 1000 * 1000, "run"]
            assert run["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= run["ts"] + run["dur"]
    assert os.listdir(tmp_path) == ["trace.json.gz"]
    assert ours.last is not None
    assert ours.last.begun > 0


def test_steps_that_the_function_counts(tmp_path: Path) -> None:
    launcher(train_by_hand, 2, profile=tmp_path / "trace.json", profile_steps=(0, 3), profile_ranks=[1])()
    events = read(tmp_path / "trace.json")
    assert steps_of(events) == {1: ["0", "1", "2"]}
    assert {event["pid"] for event in events if event.get("cat") == "mlaunch"} == {1000, 2000}


@pytest.mark.slow
def test_a_function_that_ends_before(tmp_path: Path) -> None:
    """What it came to stands there; if that is nothing, it is told."""
    path = tmp_path / "trace.json"
    launcher(train, 1, profile=path, profile_steps=[1, 100])()
    assert steps_of(read(path))[0][:5] == ["1", "2", "3", "4", "5"]
    path.unlink()
    with pytest.warns(RuntimeWarning, match=r"trace\.json' is not written: no rank came to step 7 of train\(\)"):
        launcher(train, 1, profile=path, profile_steps=(7, 9))()
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_function_that_fails(tmp_path: Path) -> None:
    def fail() -> None:
        train()
        raise ValueError("no such luck")

    with pytest.raises(ValueError, match="no such luck"):
        launcher(fail, 2, profile=tmp_path / "trace.json", profile_steps=(1, 2))()
    assert steps_of(read(tmp_path / "trace.json")) == {0: ["1"], 1: ["1"]}


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_fails(tmp_path: Path) -> None:
    def fail() -> None:
        for step in mlaunch.progress(range(20)):
            if step == 4:
                (tmp_path / f"{dist.get_rank()}").touch()
            if step == 4 and dist.get_rank() == 1:
                wait_until((tmp_path / "0").exists)
                raise ValueError("no such luck")
            dist.all_reduce(torch.ones(8))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="no such luck"):
            launcher(fail, 2, profile=tmp_path / "trace.json", profile_steps=(2, 9), grace_period=60)()
    found = steps_of(read(tmp_path / "trace.json"))
    assert found[0][:2] == found[1][:2] == ["2", "3"]


@pytest.mark.slow
def test_a_rank_that_is_killed_as_it_records(tmp_path: Path) -> None:
    def die() -> None:
        for step in mlaunch.progress(range(20)):
            if step == 4 and dist.get_rank() == 1:
                os._exit(3)
            dist.all_reduce(torch.ones(8))

    with (
        pytest.raises(LaunchError),
        pytest.warns(RuntimeWarning, match=r"lacks rank 1, which had begun to record, and ended or failed before"),
    ):
        launcher(die, 2, profile=tmp_path / "trace.json", profile_steps=(0, 9), grace_period=60)()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_rank_that_is_not_there_any_more(tmp_path: Path) -> None:
    def die() -> None:
        if dist.get_rank() == 0:
            train_by_hand()
        (tmp_path / f"{dist.get_rank()}").touch()
        dist.barrier()
        os._exit(3)

    with (
        pytest.raises(LaunchError),
        pytest.warns(RuntimeWarning, match=r"trace\.json' lacks rank 1, which did not come to step 1"),
    ):
        launcher(die, 2, profile=tmp_path / "trace.json", profile_steps=(1, 2))()
    assert steps_of(read(tmp_path / "trace.json")) == {0: ["1"]}


@pytest.mark.slow
def test_a_rank_that_is_ended_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another rank's failure, which often ends its own loop, too: its file is whole."""
    export = torch.profiler.profile.export_chrome_trace

    def end_and_export(profile: torch.profiler.profile, path: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        export(profile, path)

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", end_and_export)
    ours = launcher(train, 1, profile=tmp_path / "trace.json", profile_steps=(1, 2), start_method="fork")
    with pytest.raises(LaunchError, match="was killed by SIGTERM"):
        ours()
    assert steps_of(read(tmp_path / "trace.json")) == {0: ["1"]}


@pytest.mark.slow
def test_a_profiler_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def export(_: object, path: str) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    ours = launcher(train, 1, profile=tmp_path / "trace.json", profile_steps=(1, 2), start_method="fork")
    with pytest.warns(
        RuntimeWarning, match="is not written: it lacks rank 0, which had begun to record, and ended or failed"
    ):
        assert ours() == [0]
    assert "rank 0 is not profiled: OSError: [Errno 28] No space left on device" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("path", "why"),
    [("no/trace.json", "No such file or directory"), ("", "it is a directory"), ("/proc/trace.json", "No such file")],
)
def test_a_path_that_cannot_be_written(tmp_path: Path, path: str, why: str) -> None:
    def never() -> None:
        (tmp_path / "it ran").touch()

    with pytest.raises(OSError, match=rf"profile='.*' cannot be written: {why}"):
        launcher(never, 1, profile=tmp_path / path)()
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_machines_of_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parts come to the caller, who makes one file of them; nothing stays on the machines."""
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(there))
    ours = launcher(train, 1, engine=Threads(), profile=tmp_path / "trace.json.gz", profile_steps=(2, 4))
    assert ours() == [0, 1]
    events = read(tmp_path / "trace.json.gz")
    assert steps_of(events) == {0: ["2", "3"], 1: ["2", "3"]}
    spans = {(event["pid"], event["name"]): event for event in events if event.get("cat") == "mlaunch"}
    slack = 0.1e6  # the clocks of a test's machines are one; a caller hears with delay
    for event in events:
        if event["name"].startswith("ProfilerStep#"):
            run = spans[event["pid"] // 1000 * 1000, "run"]
            assert run["ts"] - slack <= event["ts"] <= event["ts"] + event["dur"] <= run["ts"] + run["dur"] + slack
    assert sorted(os.listdir(tmp_path)) == ["there", "trace.json.gz"]
    assert os.listdir(there) == []


@pytest.mark.slow
def test_a_single_machine_of_an_engine(tmp_path: Path) -> None:
    def fail() -> None:
        train()
        raise ValueError("no such luck")

    call = launcher(fail, 1, engine=Threads(), machines=1, profile=tmp_path / "trace.json", profile_steps=(1, 2))
    with pytest.raises(ValueError, match="no such luck"):
        call()
    events = read(tmp_path / "trace.json")
    assert steps_of(events) == {0: ["1"]}
    [run] = [event for event in events if event["name"] == "run"]
    [step] = [event for event in events if event["name"] == "ProfilerStep#1"]
    assert run["ts"] <= step["ts"] <= run["ts"] + run["dur"]


def test_profiles_that_machines_of_an_engine_cannot_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said before there are ranks."""

    def never() -> None:
        (tmp_path / "it ran").touch()

    engine = Threads()
    with pytest.raises(OSError, match=r"profile='.*no/trace' cannot be written: No such file or directory"):
        launcher(never, 1, engine=engine, profile=tmp_path / "no" / "trace")()
    assert not engine.placements
    with pytest.raises(ValueError, match=r"profile_ranks=\[2\]: allowed: ranks of this launch, 0 to 1"):
        launcher(never, 1, engine=engine, profile=tmp_path / "trace", profile_ranks=[2])()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    with pytest.raises(LaunchError, match=r"host m\d: .*the parts of profile= cannot be written to .*/full: No such"):
        launcher(never, 1, engine=engine, profile=tmp_path / "trace")()
    assert os.listdir(tmp_path) == []


def test_where_it_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "trace.json")
    with pytest.raises(ValueError, match=rf"profile='{path}' with keep=: these ranks stay; allowed: a call with ranks"):
        launcher(train, 2, profile=path, keep=5.0)
    with pytest.raises(ValueError, match=r"profile='.*' with submit\(\): allowed: None"):
        launcher(train, 2, profile=path).submit()
    with pytest.raises(ValueError, match=r"profile_ranks=\[0, 2\]: allowed: ranks of this launch, 0 to 1"):
        launcher(train, 2, profile=path, profile_ranks=[0, 2])()
    with pytest.raises(ValueError, match=r"Ranks does not take profile \(it would have steps"):
        Ranks(n_gpus=2, profile=path)
    assert os.listdir(tmp_path) == []


SCRIPT = """
import sys
import torch.distributed as dist
import mlaunch
dist.init_process_group("gloo")
for _ in mlaunch.progress(range(4)):
    dist.barrier()
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.nightly("0")
@pytest.mark.slow
@pytest.mark.parametrize("status", [0, 3])
def test_steps_of_a_command(tmp_path: Path, status: int) -> None:
    """Also of one that fails later."""
    flags = ("--nproc-per-node", "2", "--profile", "trace.json.gz", "--profile-steps", "1,3", "--profile-ranks", "0")
    done = run(tmp_path, *flags, write(tmp_path, SCRIPT), str(status))
    assert done.returncode == status, done.stderr
    events = read(tmp_path / "trace.json.gz")
    assert steps_of(events) == {0: ["1", "2"]}
    assert {event["pid"] for event in events if event.get("cat") == "mlaunch"} == {1000, 2000}
    assert sorted(os.listdir(tmp_path)) == ["trace.json.gz", "train.py"]


REFUSED = [
    (["--profile", "no/trace.json"], r"--profile /.*/no/trace\.json cannot be written: No such file or directory"),
    (["--profile", "t", "--profile-steps", "4,2"], "--profile-steps 4,2: allowed: two numbers of steps, from 0: the"),
    (["--profile", "t", "--profile-ranks", "1,1"], "--profile-ranks 1,1: allowed: ranks, each once, with commas betw"),
    (["--profile", "t", "--no-python"], "--profile with --no-python: allowed: one of the two"),
    (["--profile", ""], "--profile: allowed: the path of a file"),
]


@pytest.mark.parametrize(("flags", "words"), REFUSED, ids=[" ".join(flags) for flags, _ in REFUSED])
def test_command_lines_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    """Before anything runs."""
    monkeypatch.chdir(tmp_path)
    program = "true" if "--no-python" in flags else write(tmp_path, "open('it ran', 'w')")
    with pytest.raises(SystemExit) as left:
        launches.command("run", *flags, program)
    assert left.value.code == 2
    assert re.search(words, capsys.readouterr().err)
    assert set(os.listdir(tmp_path)) <= {"train.py"}


@pytest.mark.slow  # it starts an interpreter, which counts no ranks before
def test_ranks_that_a_command_does_not_have(tmp_path: Path) -> None:
    done = run(tmp_path, "--profile", "t", "--profile-ranks", "0,2", write(tmp_path, "open('it ran', 'w')"))
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "mlaunch run: --profile-ranks 0,2: allowed: ranks of this launch, 0 to 0",
    )
    assert os.listdir(tmp_path) == ["train.py"]


def test_step_elsewhere_does_nothing() -> None:
    mlaunch.step()
    assert launcher(train, 1)() == [0]
