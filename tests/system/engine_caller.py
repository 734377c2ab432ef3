"""A process that calls on an engine's machines: it takes the name of a scenario per line, and answers in JSON.

argv: how the engine is made, and how many machines there are.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mlaunch
from mlaunch import Ranks, engines, launcher
from mlaunch.engines import Cluster
from tests import launches

IMPATIENT: dict[str, Any] = {"heartbeat_timeout": 2, "grace_period": 0.5}
SIZE = 2  # ranks on a machine that says nothing else


class Point:
    """It travels by value."""

    def __init__(self, x: int) -> None:
        self.x = x


class Trigger(io.StringIO):
    """Does something once a text has been printed: interrupts this process, as Ctrl-C would."""

    def __init__(self, text: str, act: Callable[[], None] = lambda: signal.raise_signal(signal.SIGINT)) -> None:
        super().__init__()
        self._text, self._act = text, act

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._text in self.getvalue():
            self._text = "\0"
            self._act()
        return written


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_for_ever() -> None:
    while True:  # a request for stacks ends a pause
        signal.pause()


def values(engine: Any) -> Any:
    factor = 10

    def work(point: Point) -> tuple[int, float, Point, str]:
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total)
        return dist.get_rank(), total.item(), Point(point.x * factor), os.environ.get("SLURM_PROCID", "")

    call = launcher(work, engine=engine)
    found = call(Point(4))
    report = call.last
    rows = [] if report is None else [(row.rank, row.end) for row in report.ranks]
    return [[rank, total, point.x, task] for rank, total, point, task in found], rows


def many(engine: Any) -> Any:
    """Eight on each machine that says nothing else."""

    def work() -> tuple[int, int]:
        total = torch.ones(1)
        dist.all_reduce(total)
        return dist.get_rank(), int(total.item())

    return launcher(work, 8, engine=engine)()


def printing(engine: Any) -> Any:
    def work() -> None:
        print(f"rank {dist.get_rank()} prints")
        sys.stderr.write("all of them\n")

    return launcher(work, engine=engine)()


def raising(engine: Any) -> Any:
    def work() -> None:
        fails = dist.get_rank() == dist.get_world_size() - 1
        dist.barrier()  # the last call before the second one: a rank that is slow to leave it is in a barrier, too
        if fails:
            raise ValueError("no such luck")
        dist.barrier()

    return launcher(work, engine=engine)()


def killed(engine: Any) -> Any:
    def work() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_ever()

    return launcher(work, engine=engine)()


def member_killed(engine: Any) -> Any:
    def work() -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            pid = os.getpid()
            for _ in range(3):  # agent, fork server, member
                pid = parent(pid)
            os.kill(pid, signal.SIGKILL)
        wait_for_ever()

    return launcher(work, engine=engine)()


def interrupted(engine: Any) -> Any:
    def work() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            print("running", flush=True)
        wait_for_ever()

    with contextlib.redirect_stdout(Trigger("running")):
        return launcher(work, engine=engine, grace_period=0.5)()


def cut(engine: Any) -> Any:
    """Tells when its ranks run, and never ends by itself."""

    def work() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            print("running", flush=True)
        wait_for_ever()

    with contextlib.redirect_stdout(Straight("running", '{"runs": true}\n')):
        return launcher(work, engine=engine, heartbeat_timeout=2, grace_period=0.5)()


def preempted(engine: Any) -> Any:
    """Tells when its ranks run, saves when they are told to stop, and ends when they have started anew."""

    def work() -> str:
        dist.barrier()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
            return "done"
        if dist.get_rank() == 0:
            print("running", flush=True)
        while not mlaunch.stopping():
            dist.barrier()
        return "saved"

    with contextlib.redirect_stdout(Straight("running", '{"runs": true}\n')):
        return launcher(work, engine=engine, stop_on="TERM", max_preemptions=1, grace_period=0.5)()


def secret(engine: Any) -> Any:
    """Where the launch's secret stands on its machines: command lines, variables, files of the batch system."""
    tokens = launches.tokens()
    drawn, folder = tokens.draw(), str(Path(os.environ.get("SLURM_CONF", "/nonexistent/x")).parent)

    def look(start: str, rest: str) -> list[str]:
        wanted, found = (start + rest).encode(), []
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        for path in [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ"), *files]:
            with contextlib.suppress(OSError):
                found += [str(path)] if wanted in path.read_bytes() else []
        return found

    draw, tokens.draw = tokens.draw, lambda: drawn
    try:
        return launcher(look, engine=engine)(drawn[:20], drawn[20:])
    finally:
        tokens.draw = draw


def queued(engine: Any) -> Any:
    """Interrupted while it waits for machines."""
    with contextlib.redirect_stderr(Trigger("is queued by Slurm")):
        return launcher(wait_for_ever, engine=engine)()


def waiting(engine: Any) -> Any:
    """Tells when it waits for machines."""
    engine.heartbeat_timeout = 1.0
    with contextlib.redirect_stderr(Straight("is queued by Slurm", '{"waits": true}\n')):
        return launcher(wait_for_ever, engine=engine, deadline=5, grace_period=0.5)()


def inside(_engine: Any) -> Any:
    """In a job, as its shell would be, whose nodes are used and not given back."""
    asked = ["salloc", "--no-shell", "--nodes=2", "--exclusive"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stderr
    job = said.split()[-1]
    os.environ["SLURM_JOB_ID"] = job
    try:
        found = launcher(dist.get_rank, SIZE, engine=engines.Slurm())()
        left = subprocess.run(["squeue", "-h", "-o", "%i"], capture_output=True, text=True, check=True).stdout
        return found, left.split() == [job]
    finally:
        del os.environ["SLURM_JOB_ID"]
        subprocess.run(["scancel", job], check=True)


def nowhere(_engine: Any) -> Any:
    return launcher(wait_for_ever, engine=engines.Slurm(partition="nope"))()


def late(engine: Any) -> Any:
    return launcher(wait_for_ever, engine=engine, deadline=3, grace_period=0.5)()


def restarted(engine: Any) -> Any:
    def work() -> str:
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if attempt == "0" and dist.get_rank() == 0:
            raise ValueError("the first time")
        return attempt

    return launcher(work, engine=engine, max_restarts=1)()


def large(engine: Any) -> Any:
    tensor = torch.arange(4 << 20)  # 32 MiB

    def work(given: torch.Tensor) -> torch.Tensor:
        return given + dist.get_rank()

    found = launcher(work, engine=engine)(tensor)
    return [bool(torch.equal(value, tensor + rank)) for rank, value in enumerate(found)]


def sweeping(engine: Any) -> Any:
    """Trials on a machine each, with ranks of their own and on those that stay, and on both machines."""

    def work(x: int) -> tuple[int, int, str]:
        total = torch.tensor(x)
        dist.all_reduce(total)
        return int(total), os.getpid(), os.environ["GROUP_RANK"]

    alone = launcher(work, engine=engine, machines=1)
    found = [[value[0] for value in values] for values in alone.map([1, 2, 3, 4]).results(60)]
    wide = alone.options(machines=2).submit(1).result(60)
    kept = alone.options(keep=60).map([1, 1, 1, 1]).results(60)
    sets = {tuple(pid for _, pid, _ in values) for values in kept}
    launcher(work, engine=engine)(1)  # those that stay make room
    return found, [place for _, _, place in wide], len(sets)


def giant_argument(engine: Any) -> Any:
    return launcher(len, engine=engine, **IMPATIENT)(bytes(1 << 30))


def giant_value(engine: Any) -> Any:
    def work() -> bytes:
        return bytes(1 << 30 if dist.get_rank() == dist.get_world_size() - 1 else 1)

    return [len(value) for value in launcher(work, engine=engine, **IMPATIENT)()]


def memory(engine: Any) -> Any:
    """The last rank needs more than there is."""

    def fill() -> int:
        dist.barrier()
        return len(b"x" * (4 << 30 if dist.get_rank() == dist.get_world_size() - 1 else 1))

    return launcher(fill, engine=engine)()


def staying(engine: Any) -> Any:
    """Ranks that stay: what they hold is there after a call that fails on one machine, and after one on all is cut."""

    def fail() -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("no such luck")

    def work(held: list[int]) -> tuple[int, list[int]]:
        held.append(dist.get_rank())
        total = torch.ones(1)
        dist.all_reduce(total)
        return os.getpid(), held

    def stay() -> None:
        if dist.get_rank() == 0:
            print("running", flush=True)
        wait_for_ever()

    with Ranks(engine=engine, grace_period=5) as ranks:
        held = ranks.hold(list)
        before = ranks.run(work, held)
        with contextlib.suppress(ValueError):
            ranks.run(fail)
        with contextlib.suppress(KeyboardInterrupt), contextlib.redirect_stdout(Trigger("running")):
            ranks.run(stay)
        after = ranks.run(work, held)
    return [pid for pid, _ in before] == [pid for pid, _ in after], [found for _, found in after]


def processes(engine: Any) -> Any:
    """Tells of all processes of a call while it runs, and is never done."""

    def work() -> None:
        pids = [os.getpid()]
        for _ in range(3):
            pids.append(parent(pids[-1]))
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, pids)
        if dist.get_rank() == 0:
            print(json.dumps({"pids": sorted({pid for some in found for pid in some})}), flush=True)
        wait_for_ever()

    with contextlib.redirect_stdout(Straight("{")):
        return launcher(work, engine=engine)()


def unheard(engine: Any) -> Any:
    """The same, on machines that leave some seconds after this process has fallen silent."""
    engine.heartbeat_timeout = 4.0
    return processes(engine)


def scene(engine: Any) -> Any:
    """Ranks say in a folder where they are, and wait there until they may return a value of some size."""
    folder = Path(os.environ["SCENE"])

    def work() -> bytes:
        (folder / f"run-{dist.get_rank()}").touch()
        while not (folder / "go").exists():
            time.sleep(0.02)
        value = bytes(int((folder / "size").read_text()))
        (folder / f"return-{dist.get_rank()}").touch()
        return value

    found = launcher(work, engine=engine, deadline=20, heartbeat_timeout=3, grace_period=1, join_timeout=15)()
    return [len(value) for value in found]


def whole(engine: Any) -> Any:
    """Holds machines, calls on them, and gives them back."""
    with engine.hold() as held:
        return launcher(dist.get_rank, engine=held, join_timeout=60)()


def repeated(engine: Any) -> Any:
    """Makes many calls; tells what this process, members and fork servers have open after some and after all."""

    def census(pid: int) -> tuple[int, int]:
        return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))

    def work() -> list[tuple[int, int]]:
        server = parent(parent(os.getpid()))
        return [census(server), census(parent(server))]

    call = launcher(work, engine=engine, progress=False)
    found = []
    for _ in range(int(os.environ["SCENE_CALLS"])):
        values = call()
        found.append([census(os.getpid()), *(row for value in values for row in value)])
    return found[9], found[-1]


class Straight(io.StringIO):
    """Passes on what is printed from a mark on, or words instead of that."""

    def __init__(self, mark: str, words: str = "") -> None:
        super().__init__()
        self._mark, self._words = mark, words

    def write(self, text: str) -> int:
        out = sys.__stdout__
        if out is not None and self._mark in text:
            out.write(self._words or text[text.index(self._mark) :])
            out.flush()
        return len(text)


SCENARIOS: dict[str, Callable[[Any], Any]] = {
    run.__name__: run
    for run in (
        values, many, printing, raising, killed, member_killed, interrupted, late, restarted, large, staying,
        sweeping, processes, unheard, scene, whole, queued, waiting, inside, nowhere, cut, preempted, repeated,
        giant_argument, giant_value, memory, secret,
    )
}  # fmt: skip


def answer(run: Callable[[Any], Any], engine: Any) -> dict[str, Any]:
    out, err = io.StringIO(), io.StringIO()
    found: dict[str, Any] = {}
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            found["value"] = run(engine)
        except BaseException as error:
            report = launches.report_of(error)
            found |= {"error": type(error).__name__, "text": str(error), "report": str(report or "")}
            found["notes"] = [*getattr(error, "__notes__", []), *getattr(report, "__notes__", [])]
            found["trace"] = traceback.format_exc()
    return {**found, "out": out.getvalue(), "err": err.getvalue()}


def main() -> None:
    made = eval(sys.argv[1], {name: getattr(engines, name) for name in engines.__all__})
    machines = int(sys.argv[2])
    made.heartbeat_timeout = float(os.environ.get("SCENE_HEARTBEAT", made.heartbeat_timeout))
    if limit := os.environ.get("SCENE_END_TIMEOUT"):
        launches.be_patient(pytest.MonkeyPatch(), "end of an allocation", float(limit))
    held: Cluster | None = None
    print("ready", flush=True)
    for line in sys.stdin:
        name, _, how = line.strip().partition(" ")
        if name == "hold":
            held = made.hold(machines, SIZE)
            print(json.dumps(held.hosts), flush=True)
            continue
        if name == "close":
            if held is not None:
                held.close()
            print(json.dumps("closed"), flush=True)
            continue
        engine = held if how == "held" else OnItsOwn(made, machines)
        print(json.dumps(answer(SCENARIOS[name], engine)), flush=True)


class OnItsOwn:
    """An engine that gives so many machines to each call."""

    def __init__(self, engine: Any, machines: int) -> None:
        self._engine, self._machines = engine, machines
        self.heartbeat_timeout = engine.heartbeat_timeout

    def hold(self) -> Cluster:
        return self._engine.hold(self._machines, SIZE)

    def call(self, options: Any, *others: Any) -> Any:
        size = options.n_gpus or SIZE
        self._engine.heartbeat_timeout = self.heartbeat_timeout
        return self._engine.call(options.replaced({"machines": self._machines, "n_gpus": size}), *others)


if __name__ == "__main__":
    main()
