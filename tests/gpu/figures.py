"""What a call costs on the devices: warm, kept and on ranks that stay, against mp.spawn and torchrun."""

from __future__ import annotations

import functools
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing

from mlaunch import Ranks, launcher
from tests.gpu.place import KIND, count
from tests.gpu.work import join, reduce_once

MARK = "figure: "  # before each line that the documentation can take
FEW, MANY = 3, 20  # calls of which the median is taken
PAUSE = 0.5  # seconds, in which the next launch is prepared
SCRIPT = """
from tests.gpu import work
work.join_by_environment()
"""
COMMANDS = {"mlaunch run": ["-m", "mlaunch", "run"], "torchrun": ["-m", "torch.distributed.run"]}


def spawn(size: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    torch.multiprocessing.spawn(join, (size, port), nprocs=size)


def command(arguments: list[str], size: int, script: str) -> None:
    full = [sys.executable, *arguments, f"--nproc-per-node={size}", script]
    done = subprocess.run(full, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")


def seconds(work: Callable[[], object], *, pause: float = 0.0) -> float:
    time.sleep(pause)
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def told(case: str, work: Callable[[], Any], times: int, *, pause: float = 0.0) -> None:
    """Measures and prints; a contestant that cannot run is said so, and the others go on."""
    try:
        work()
        taken = statistics.median(seconds(work, pause=pause) for _ in range(times))
        print(f"{MARK}{case:<44} {taken * 1000:10.1f} ms", flush=True)
    except Exception as error:
        print(f"{MARK}{case:<44} did not run: {type(error).__name__}: {error}".partition("\n")[0], flush=True)


def run() -> None:
    size = count()
    print(f"{MARK}{size} rank(s) on {KIND}, one reduction each; medians")
    call = launcher(reduce_once)
    print(f"first call: {seconds(call):.1f} s")
    told("a warm call after a pause", call, FEW * 2, pause=PAUSE)
    told("a warm call, back to back", call, FEW * 2)
    told("a call with keep=60", launcher(reduce_once, keep=60), MANY)
    with Ranks() as ranks:
        told("a call of Ranks", functools.partial(ranks.run, reduce_once), MANY)
    told("torch.multiprocessing.spawn", functools.partial(spawn, size), FEW)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT, encoding="utf-8")
        for name, arguments in COMMANDS.items():
            told(f"{name}, the whole command", functools.partial(command, arguments, size, str(script)), FEW)
