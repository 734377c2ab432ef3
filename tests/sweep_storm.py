"""Sweeps of many trials, of which some fail, are pruned, or lose their caller.

    python -m tests.sweep_storm failures [trials]    # every other value right, nothing left, the caller's memory flat
    python -m tests.sweep_storm pruned [trials]      # of 4 ranks with DDP, each at one step on all ranks
    python -m tests.sweep_storm killed [trials] [script|notebook]    # what resume= repeats

What these gave last is in ``docs/sweeps.rst``, "What was tried".
"""

from __future__ import annotations

import collections
import gc
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mlaunch
from mlaunch import launcher
from tests import launches
from tests.conftest import ROOT, _shared_memory
from tests.contract.crashes import HOW, PLACES, Fuse
from tests.processes import children, descendants, wait_gone

# What ends the fork server ends the trials beside it, too, and is none of this.
_ENDS = [how for how in HOW if how not in {"stops its agent", "stops the fork server", "caller dies"}]
_PATIENCE = 8.0  # seconds for a trial: those that never end take as long
_TIDY = 30.0  # seconds for what is left to leave
_EVERY = 100  # trials between looks at the memory


@dataclass
class Failures:
    """What came of a sweep of which a third was to fail. ``mib``: the caller's memory (PSS) on the way."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: int = 0
    survived: int = 0  # though they were to fail: what an exit handler raises is printed alone
    mib: list[float] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)  # that Python's collector sees in the caller
    left: list[str] = field(default_factory=list)


def end_or_return(number: int, where: str, fuse: Any) -> Any:
    """Ends as the matrix of crashes has it, in rank 1; or returns a sum of all ranks'."""
    if where in PLACES:
        return PLACES[where](fuse)
    both = torch.tensor([number])
    dist.all_reduce(both)
    return number, both.item()


def failures(trials: int, seed: int = 1) -> Failures:
    """Makes a sweep of which a third fails; return values of the others are compared."""
    chance, found = random.Random(seed), Failures()
    plan = [_chosen(chance) for _ in range(trials)]
    launcher(int, 2)()  # the fork server stays
    launches.drop_prepared()
    before = _standing()
    train = launcher(end_or_return, 2, concurrent=4, deadline=_PATIENCE, grace_period=0.1, output="none")
    runs = train.map(range(trials), [where for where, _ in plan], [fuse for _, fuse in plan], return_exceptions=True)
    for count, _ in enumerate(runs.as_completed(), 1):
        if count % _EVERY == 0:
            gc.collect()
            found.mib.append(round(pss(os.getpid()), 1))
            found.objects.append(len(gc.get_objects()))
    for number, (run, (where, _)) in enumerate(zip(runs, plan, strict=True)):
        _compare(found, number, where, run.exception() or run.result())
    del runs
    launches.drop_prepared()
    wait_gone(children(launches.server_pid()))
    found.left = _left(before)
    return found


def _left(before: set[str]) -> list[str]:
    """Returns what is there still after some time; a fork server in the place of one that was killed does not count."""
    end = time.monotonic() + _TIDY
    while (left := _standing() - before - {f"process {launches.server_pid()}"}) and time.monotonic() < end:
        signal.sigtimedwait([], 0.1)
    return sorted(left)


def _chosen(chance: random.Random) -> tuple[str, object]:
    if chance.randrange(3):
        return "", None
    where, how = chance.choice([*PLACES, "unpickling"]), chance.choice(_ENDS)
    return where, how if where in PLACES else Fuse(how, late=True)


def _compare(found: Failures, number: int, where: str, outcome: Any) -> None:
    if isinstance(outcome, Exception):
        found.failed += 1
        if not where:
            found.wrong.append(f"{number}: {type(outcome).__name__}: {outcome}")
    elif where:
        found.survived += 1
    elif outcome == [(number, 2 * number)] * 2:
        found.right += 1
    else:
        found.wrong.append(f"{number}: {outcome}")


def _standing() -> set[str]:
    """Names what a sweep may leave behind, beside the fork server and what that has prepared."""
    held, waiting = launches.leases()
    fds = collections.Counter(os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in _open_fds())
    return {
        *(f"lease {one}" for one in (*held, *waiting)),
        *(f"/dev/shm/{name}" for name in _shared_memory()),
        *(f"process {pid}" for pid in descendants(os.getpid())),
        *(f"{count} descriptors: {kind}" for kind, count in fds.items()),
    }


def _open_fds() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def pss(pid: int) -> float:
    """Returns the memory of a process in MiB, its share of what it shares."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    return next(int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith("Pss:"))


@dataclass
class Pruned:
    """``at_one_step``: trials whose ranks all stopped at the same step; ``never``: some rank was not stopped."""

    trials: int
    at_one_step: int = 0
    never: int = 0
    steps: list[int] = field(default_factory=list)


def learn(most: int = 10**6) -> tuple[int, bool]:
    """Trains with DDP until it is to stop; returns at which step that was."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, most):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        mlaunch.report(step, loss=loss.item())
        if mlaunch.stopping():
            return step, True
    return most, False


def pruned(trials: int, seed: int = 1) -> Pruned:
    """Stops each trial once a rank has reported a random number of steps."""
    chance, found = random.Random(seed), Pruned(trials)
    runs = launcher(learn, 4, device_type="cpu", concurrent=1, output="none").map([10**6] * trials)
    for run in runs:
        last = chance.randint(1, 60)
        run.on_report(lambda told, run=run, last=last: told.step >= last and run.stop("pruned"))  # type: ignore[misc]
    for values in runs.results():
        steps = {step for step, _ in values}
        found.never += not all(stopped for _, stopped in values)
        found.at_one_step += len(steps) == 1 and len(values) == 4
        found.steps.append(max(steps))
    return found


SWEEP = """
import os
from mlaunch import launcher

def train(number):
    fd = os.open("begun", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, f"{{number}}\\n".encode())
    os.close(fd)
    return number * number

runs = launcher(train, 1, device_type="cpu", concurrent=4, output="none").map(range({trials}), resume="sweep.jsonl")
"""
_SCRIPT = SWEEP + "print([value for [value] in runs.results()])\n"
_CELLS = """
import os, signal, sys, time
from jupyter_client.manager import start_new_kernel
from tests.processes import children
manager, client = start_new_kernel(kernel_name="python3", env=dict(os.environ))
client.execute(sys.argv[1])
until = int(sys.argv[2])
while not os.path.exists("sweep.jsonl") or open("sweep.jsonl").read().count("\\n") <= until:
    time.sleep(0.001)
os.kill(manager.provisioner.pid, signal.SIGKILL)
client.stop_channels()
manager.shutdown_kernel(now=True)
"""


@dataclass
class Killed:
    """``repeated``: trials that ran twice; ``known``: that were in the file when their caller was killed."""

    trials: int
    known: int
    repeated: int
    known_and_repeated: int
    right: bool


def killed(folder: Path, trials: int, kind: str = "script", seed: int = 1) -> Killed:
    """Kills the caller of a sweep at a random moment, and runs the same once more."""
    code, after = _SCRIPT.format(trials=trials), random.Random(seed).randint(1, trials - 5)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    if kind == "notebook":
        command = [sys.executable, "-c", _CELLS, SWEEP.format(trials=trials), str(after)]
        subprocess.run(command, cwd=folder, env=environ, check=True)
    else:
        _run_and_kill([sys.executable, "-c", code], folder, environ, after)
    known = _known(folder)
    begun = _begun(folder)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environ, stdout=subprocess.PIPE, check=True)
    again = collections.Counter(_begun(folder)) - collections.Counter(begun)
    values = json.loads(done.stdout)
    return Killed(
        trials,
        len(known),
        len(set(again) & set(begun)),
        len(set(again) & known),
        values == [number * number for number in range(trials)] and set(again) | known == set(range(trials)),
    )


def _run_and_kill(command: Sequence[str], folder: Path, environ: dict[str, str], after: int) -> None:
    with subprocess.Popen(command, cwd=folder, env=environ) as caller:
        while len(_known(folder)) < after and caller.poll() is None:
            signal.sigtimedwait([], 0.001)
        pids = [pid for child in children(caller.pid) for pid in (child, *descendants(child))]
        caller.kill()
    wait_gone(pids)


def _known(folder: Path) -> set[int]:
    path = folder / "sweep.jsonl"
    lines = path.read_bytes().split(b"\n")[1:-1] if path.exists() else []
    return {json.loads(json.loads(line)["arguments"])["number"] for line in lines}


def _begun(folder: Path) -> list[int]:
    path = folder / "begun"
    return [int(line) for line in path.read_text(encoding="utf-8").split()] if path.exists() else []


def main() -> None:
    kind, *words = sys.argv[1:] or ["failures"]
    begun = time.monotonic()
    found: object
    if kind == "failures":
        found = failures(*map(int, words or ["1000"]))
    elif kind == "pruned":
        mlaunch.warm_up(preload=["torch._dynamo"])
        found = pruned(*map(int, words or ["100"]))
    else:
        count, how = itertools.islice([*words, *["200", "script"][len(words) :]], 2)
        with tempfile.TemporaryDirectory() as folder:
            found = killed(Path(folder), int(count), how)
    print(found, f"{time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
