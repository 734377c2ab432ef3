"""``slow=``: a rank for which the others wait is named, by what each has waited for itself."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from mlaunch import Ranks, launcher
from tests import launches, schema
from tests.conftest import ROOT
from tests.processes import wait_until
from tests.system.network import free_port

STEP = 0.05  # seconds
LIMIT = 120.0  # seconds in which a rank is named, on any machine


def train(seconds: float, slowed: int | None, *, model: bool, until: str = os.devnull) -> int:
    """Take steps for that time at most: until the file ``until`` has something in it."""
    import torch
    import torch.distributed as dist

    rank, steps, ends = dist.get_rank(), 0, time.monotonic() + seconds
    goes_on = torch.ones(1)
    wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8)) if model else None
    while goes_on.item():
        time.sleep(STEP * (1.5 if rank == slowed else 1))
        if wrapped is not None:
            wrapped(torch.ones(4, 8)).sum().backward()
        goes_on[0] = time.monotonic() < ends and not os.stat(until).st_size
        if wrapped is None or steps % 8 == 0:
            dist.all_reduce(goes_on, dist.ReduceOp.MIN)
        steps += 1
        goes_on[0] = 1.0 if steps % 8 and wrapped is not None else goes_on[0]
    return steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["collectives", "a model"]
)
def test_a_slow_rank_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *, model: bool
) -> None:
    """To the user, once; in ``mlaunch ps`` and ``why`` meanwhile; in the report."""
    pytest.importorskip("torch", reason="the ranks' collectives are torch's")
    launches.hurry_slow(monkeypatch, 3.0)
    said, why, events = dict[str, str](), list[str](), list[dict[str, Any]]()
    call = launcher(train, 3, device_type="cpu", slow="10%", events=events.append)

    def look() -> None:
        while not done.wait(0.5):
            if "rank 1 came last to" in (told := call.why()):  # another one may be for a moment, on a busy machine
                why.append(told)
                said["ps"] = subprocess.run(
                    [sys.executable, "-m", "mlaunch", "ps"], check=True, capture_output=True, text=True
                ).stdout
                return

    done = threading.Event()
    looking = threading.Thread(target=look)
    looking.start()
    try:
        call(25.0 if model else 9.0, 1, model=model)  # the first model of a process imports for seconds
    finally:
        done.set()
        looking.join()
    assert call.last is not None
    found = call.last.slow_ranks
    assert found is not None
    assert found.ranks == (1,)
    assert 0.1 < found.share < 0.6
    assert found.text.startswith("rank 1 came last to ")
    assert capfd.readouterr().err.count("train(): rank 1 came last to") == 1
    assert "slow: rank 1 came last to" in why[0]
    assert "\n  slow: rank 1 came last to" in said["ps"]
    assert found.text in str(call.last)
    told = json.loads(json.dumps(call.last.as_dict()))
    schema.check(told, "report")
    [event] = [event for event in json.loads(json.dumps(events)) if event["event"] == "slow"]
    schema.check(event, "event")
    assert told["slow_ranks"].items() <= event.items()


@pytest.mark.slow
@pytest.mark.nightly
def test_healthy_ranks_are_not(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="the ranks' collectives are torch's")
    launches.hurry_slow(monkeypatch, 2.0)
    call = launcher(train, 3, device_type="cpu", slow="25%")
    call(5.0, None, model=False)
    assert call.last is not None
    assert call.last.slow_ranks is None
    assert call.last.as_dict()["slow_ranks"] is None
    assert "came last to" not in capfd.readouterr().err


@pytest.mark.slow
def test_ranks_that_stay_on_machines_of_an_engine(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The one on another machine is named, to the one caller; each call by itself."""
    pytest.importorskip("torch", reason="the ranks' collectives are torch's")
    from tests.contract.test_engine_calls import Threads

    launches.hurry_slow(monkeypatch, 3.0)
    over, printed, listed = threading.Event(), list[str](), list[str]()
    (enough := tmp_path / "enough").touch()

    def is_said() -> bool:
        printed.append(capfd.readouterr().err)
        own = [one for one in of_ps() if one["agent"] == os.getpid()]
        listed.extend(one["features"]["slow"]["text"] for one in own if "slow" in one["features"])
        return all("rank 2 came last to" in "".join(texts) for texts in (printed, listed))

    def look() -> None:
        while not over.wait(0.5) and not is_said():
            pass
        enough.write_text("said")

    looking = threading.Thread(target=look)
    with Ranks(n_gpus=2, engine=Threads(), slow="10%") as ranks:  # two on the first machine, one on the second
        looking.start()
        try:
            ranks.run(train, LIMIT, 2, model=False, until=str(enough))
        finally:
            over.set()
            looking.join()
        assert ranks.last is not None
        assert ranks.last.slow_ranks is not None
        assert ranks.last.slow_ranks.ranks == (2,)
        ranks.run(int)
        assert ranks.last.slow_ranks is None
    assert any("rank 2 came last to" in text for text in listed)
    assert ("".join(printed) + capfd.readouterr().err).count("rank 2 came last to") == 1


def of_ps() -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = json.loads(subprocess.check_output([sys.executable, "-m", "mlaunch", "ps", "--json"]))
    return told


MACHINE = """
import sys
import pytest
from mlaunch import launcher
from tests import launches
from tests.contract.test_slow import LIMIT, train

rank_start, here, port = map(int, sys.argv[1:4])
with pytest.MonkeyPatch.context() as patch:
    launches.hurry_slow(patch, 3.0)
    call = launcher(train, here, 3, slow="10%", rank_start=rank_start, master_ip="127.0.0.1", port=port)
    call(LIMIT, 1, model=False, until=sys.argv[4])
    print(call.last.slow_ranks.ranks)
"""
SHIFTED = ["unshare", "--time", "--fork", "--kill-child", "--monotonic", "1000000", "--boottime", "1000000"]


@pytest.mark.nightly
@pytest.mark.slow
def test_machines_whose_clocks_differ(tmp_path: Path) -> None:
    """By eleven days: no clock is compared with another one. Each caller is told, the slow rank's among them."""
    pytest.importorskip("torch", reason="the ranks' collectives are torch's")
    if subprocess.run([*SHIFTED, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no time namespace can be made here")
    (enough := tmp_path / "enough").touch()
    last = [str(free_port()), str(enough)]
    machines = {
        tmp_path / "first": [sys.executable, "-c", MACHINE, "0", "1", *last],
        tmp_path / "second": [*SHIFTED, sys.executable, "-c", MACHINE, "1", "2", *last],
    }
    with contextlib.ExitStack() as stack:
        running = []
        for printed, command in machines.items():
            errors = stack.enter_context(printed.open("w"))
            running.append(subprocess.Popen(command, cwd=ROOT, stdout=PIPE, stderr=errors, text=True))
            stack.callback(running[-1].kill)

        def is_over() -> bool:
            said = all("rank 1 came last to" in printed.read_text() for printed in machines)
            return said or any(process.poll() is not None for process in running)

        wait_until(is_over)
        enough.write_text("said")
        for process, printed in zip(running, machines, strict=True):
            assert process.communicate(timeout=LIMIT)[0] == "(1,)\n", printed.read_text()
            assert "rank 1 came last to" in printed.read_text()


def test_where_it_is_not() -> None:
    with (
        Ranks(n_gpus=1, device_type="cpu") as ranks,
        pytest.raises(
            ValueError, match=r"slow='10%' with ranks=: .* without it; allowed: Ranks\(\.\.\., slow=\.\.\.\), or "
        ),
    ):
        launcher(int, ranks=ranks, slow="10%")


def test_a_short_call() -> None:
    """Over before anything is compared: its ranks are timed, and its agent has a part, and nothing is said."""
    pytest.importorskip("torch", reason="the ranks' collectives are torch's")
    call = launcher(int, 1, device_type="cpu", slow="10%")
    assert call() == [0]
    assert call.last is not None
    assert call.last.slow_ranks is None
