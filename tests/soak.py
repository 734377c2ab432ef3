"""Programs that run for long beside a sampler: nothing of theirs grows with what they do.

    python -m tests.soak [minutes] [programs]

The minutes are shared by the programs (calls, launches, training, commands, restarts), which run one after the other.
Once a second each process of one is looked at: memory of its own, descriptors, threads, children that nobody has
reaped; and the files that the program has made. A line is fitted to each figure over the number of things done (calls,
launches, looks, commands, restarts), without the first half, in which caches and pools fill: gloo's alone take 1,500
calls. Where it rises by more than a limit for 1,000 things, the soak fails. Processes that do not stay for most of the
program are left out.

Before what it found was mended, in 90 seconds a program, there were 8,003 files for 1,000 calls, 27 MiB of the caller
for 1,000 launches half of which were kept, and 2.8 MiB and 133 zombies of the agent for 1,000 looks.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import mlaunch
from mlaunch import Ranks, launcher
from tests.launches import end_kept_servers, keep_a_server, kept_servers
from tests.processes import descendants
from tests.users import users_environ

_EVERY = 1.0  # seconds between samples
_LIMIT = 120.0  # seconds for a program to end
_NUMBER = struct.Struct("=q")
_STAYS = 0.6  # of all samples in which a process must be
# By figure: for 1,000 things, and the least in all that counts: memory comes in steps, whatever is done.
LIMITS = {
    "KiB": (512.0, 1024.0),
    "descriptors": (2.0, 3.0),
    "threads": (1.0, 2.0),
    "zombies": (5.0, 5.0),
    "files": (50.0, 20.0),
}


class Done:
    """How many things a program has done, in a file that the sampler reads."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT)
        self.number = 0

    def add(self) -> None:
        self.number += 1
        os.pwrite(self._fd, _NUMBER.pack(self.number), 0)

    def read(self) -> int:
        found = os.pread(self._fd, _NUMBER.size, 0)
        return int(_NUMBER.unpack(found)[0]) if found else 0


# The programs


def _step(number: int) -> int:
    import torch
    import torch.distributed as dist

    if number % 500 == 0:
        print(f"call {number}")
    value = torch.tensor([number])
    dist.all_reduce(value)
    if number % 20 == 0:
        dist.destroy_process_group()
    return int(value)


def calls(going: Callable[[], bool], done: Done, folder: Path) -> None:
    """Short calls on ranks that stay, which keep what they print, and destroy their group now and then."""
    with Ranks(n_gpus=2, device_type="cpu", log_dir=folder / "logs") as ranks:
        while going():
            ranks.run(_step, done.number)
            done.add()


def launches(going: Callable[[], bool], done: Done, _folder: Path) -> None:
    """Short launches; every other one on ranks that are kept for a moment, with a variable of its own."""
    short = launcher(_step, n_gpus=2, device_type="cpu")
    while going():
        if done.number % 2 == 0:
            short.options(keep=0.2, env={"TRIAL": str(done.number)})(1)
        else:
            short(1)
        done.add()


def _train(seconds: float) -> int:
    import torch
    import torch.distributed as dist

    end = time.monotonic() + seconds
    for step in itertools.count():
        loss = torch.tensor([float(time.monotonic() < end)])
        dist.all_reduce(loss, op=dist.ReduceOp.MIN)
        mlaunch.report(step=step, loss=float(loss))
        if step % 10 == 0:
            os.system("true > /dev/null 2>&1 &")
        if not loss:
            return step
        time.sleep(0.01)
    return 0


def training(going: Callable[[], bool], done: Done, _folder: Path) -> None:
    """One long launch that reports and starts things in the background; the things that count are looks at it."""
    run = launcher(_train, n_gpus=2, device_type="cpu", stall=5).submit(1e9)
    while going():
        if run.state == "running" and run.stacks():
            done.add()
        else:
            signal.sigtimedwait([], 0.1)
    run.cancel()
    with contextlib.suppress(BaseException):
        run.result()


def commands(going: Callable[[], bool], done: Done, folder: Path) -> None:
    """``mlaunch run``, served by what ``mlaunch warm`` keeps."""
    script = folder / "train.py"
    script.write_text("import os; print(os.environ['RANK'])\n", encoding="utf-8")
    keep_a_server(1200)
    try:
        while going():
            command = [sys.executable, "-m", "mlaunch", "run", "--nproc-per-node", "2", str(script)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            done.add()
    finally:
        end_kept_servers()


def _fail_at_first() -> int:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "2":
        raise ValueError("no luck")
    return 1


def restarts(going: Callable[[], bool], done: Done, _folder: Path) -> None:
    """Launches that fail twice."""
    again = launcher(_fail_at_first, n_gpus=2, device_type="cpu", max_restarts=2)
    while going():
        again()
        done.add()
        done.add()


PROGRAMS = {program.__name__: program for program in (calls, launches, training, commands, restarts)}


# The sampler


@dataclass
class Series:
    """A figure by how many things were done."""

    done: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def per_thousand(self) -> tuple[float, float]:
        """Returns the rise of the line for 1,000 things, and that over all that were done."""
        if len(set(self.done)) < 2:
            return 0.0, 0.0
        slope, _ = statistics.linear_regression(self.done, self.values)
        return 1000 * slope, slope * (self.done[-1] - self.done[0])


@dataclass
class Samples:
    """What was seen of one program. ``figures``: by process or place, and name."""

    number: int = 0
    done: list[int] = field(default_factory=list)
    figures: dict[tuple[str, str], Series] = field(default_factory=lambda: defaultdict(Series))

    def take(self, caller: int, done: int, folder: Path) -> None:
        self.number += 1
        self.done.append(done)
        for pid in {caller, *descendants(caller), *(state.pid for state in kept_servers())}:
            with contextlib.suppress(OSError, LookupError):  # it ends just now
                for name, value in _figures(pid).items():
                    self._add(f"{_name(pid)} (pid {pid})", name, done, value)
        self._add("the folder", "files", done, sum(len(names) + len(files) for _, names, files in os.walk(folder)))

    def _add(self, whose: str, name: str, done: int, value: float) -> None:
        series = self.figures[whose, name]
        series.done.append(done)
        series.values.append(value)

    def grown(self) -> Iterator[tuple[str, str, float, float, bool]]:
        """Yields (whose, figure, for 1,000 things, in all, whether that is too much), of what stays."""
        for (whose, name), series in sorted(self.figures.items()):
            if len(series.done) >= _STAYS * self.number:
                first = len(series.done) // 2
                rise, total = Series(series.done[first:], series.values[first:]).per_thousand()
                limit, least = LIMITS[name]
                yield whose, name, rise, total, rise > limit and total > least


def _name(pid: int) -> str:
    text = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
    return text.removeprefix("mlaunch: ") if text.startswith("mlaunch: ") else Path(text).name


def _figures(pid: int) -> dict[str, float]:
    rows = dict(row.partition(":")[::2] for row in Path(f"/proc/{pid}/status").read_text().splitlines())
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    states = [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] for child in children]
    return {
        "KiB": float(rows["RssAnon"].split()[0]),
        "descriptors": float(len(os.listdir(f"/proc/{pid}/fd"))),
        "threads": float(rows["Threads"]),
        "zombies": float(states.count("Z")),
    }


def soak(name: str, seconds: float, folder: Path) -> Samples:
    """Runs a program, and looks at it until it ends."""
    done, samples = Done(folder / "done"), Samples()
    places = {place: str(folder) for place in ("TMPDIR", "XDG_RUNTIME_DIR", "MLAUNCH_LEASE_DIR")}
    os.environ |= places
    with open(folder / "output", "wb") as output:
        command = [sys.executable, "-m", "tests.soak", "--program", name, str(seconds), str(folder)]
        process = subprocess.Popen(command, env=users_environ(**places), stdout=output, stderr=output)
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end and process.poll() is None:
            samples.take(process.pid, done.read(), folder)
            signal.sigtimedwait([], _EVERY)
        status = process.wait(_LIMIT)
    finally:
        process.kill()
        process.wait()
    if status or len(set(samples.done)) < 2:
        said = (folder / "output").read_text(encoding="utf-8", errors="replace")[-4000:]
        raise RuntimeError(f"{name} has failed (status {status}, {samples.done[-1:]} done):\n{said}")
    return samples


def report(name: str, samples: Samples) -> bool:
    """Prints what a program has come to; returns whether anything of it grows."""
    half = len(samples.done) // 2
    speeds = [part[-1] - part[0] for part in (samples.done[:half], samples.done[half:])]
    print(f"{name}: {samples.done[-1]} done, {speeds[0]} in the first half and {speeds[1]} in the second", flush=True)
    bad = False
    for whose, figure, rise, total, is_much in samples.grown():
        bad = bad or is_much
        if is_much or rise > LIMITS[figure][0] / 4:
            word = "GROWS" if is_much else "     "
            print(f"  {word} {whose}: {rise:.1f} {figure} for 1,000, {total:.1f} in all", flush=True)
    return bad


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["--program"]:
        name, seconds, folder = words[1], float(words[2]), Path(words[3])
        end = time.monotonic() + seconds
        PROGRAMS[name](lambda: time.monotonic() < end, Done(folder / "done"), folder)
        return
    minutes, names = float((*words, "5")[0]), words[1:] or list(PROGRAMS)
    bad = []
    for name in names:
        folder = Path(tempfile.mkdtemp(prefix="mlaunch-soak-"))
        try:
            if report(name, soak(name, 60 * minutes / len(names), folder)):
                bad.append(name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"grows: {', '.join(bad)}" if bad else "nothing grows")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
