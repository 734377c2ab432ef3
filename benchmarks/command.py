"""``mlaunch run`` against torchrun, the same script: wall time from start to end, and the memory of idle ranks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.kept import kept
from benchmarks.measure import Row, alternate, compare, seconds

_REDUCE = """
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
assert value.item() == float(os.environ["WORLD_SIZE"])
dist.destroy_process_group()
"""
_IDLE = """
import os
import torch.distributed as dist
from benchmarks.memory import idle
dist.init_process_group("gloo")
os.write(1, f"{idle()}\\n".encode())
dist.barrier()
"""
_ROOT = Path(__file__).resolve().parent.parent
_COMMANDS = {
    "mlaunch run": [sys.executable, "-m", "mlaunch", "run"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
_WARM = "mlaunch run, mlaunch warm"
_LARGE = "transformers"  # what the script imports besides, and mlaunch warm has imported
_IDLE_RANKS = 8


def run(rounds: int) -> list[Row]:
    rows: list[Row] = []
    alone = {**os.environ, "PYTHONPATH": str(_ROOT), "MLAUNCH_WARM": "0"}
    with tempfile.TemporaryDirectory() as folder:
        reduce, idle, large = (Path(folder, f"{name}.py") for name in ("reduce", "idle", "large"))
        reduce.write_text(_REDUCE, encoding="utf-8")
        idle.write_text(_IDLE, encoding="utf-8")
        large.write_text(f"import {_LARGE}\n{_REDUCE}", encoding="utf-8")
        with kept({**alone, "MLAUNCH_WARM": ""}) as warm:
            for size, aim, warm_aim in ((2, "<= 0.6", "<= 0.08"), (8, "<= 0.3", "<= 0.04")):
                rows += _compared(f"the command, {size} ranks", size, reduce, (aim, warm_aim), (alone, warm), rounds)
        if importlib.util.find_spec(_LARGE) is not None:
            with kept({**alone, "MLAUNCH_WARM": ""}, "--preload", _LARGE) as warm:
                rows += _compared(f"it imports {_LARGE}, 2 ranks", 2, large, ("", "<= 0.05"), (alone, warm), rounds)
        totals = {name: _memory([*command, f"--nproc-per-node={_IDLE_RANKS}", str(idle)], alone)
                  for name, command in _COMMANDS.items()}  # fmt: skip
        rows += compare(f"PSS of {_IDLE_RANKS} idle ranks", totals, {"mlaunch run": ("torchrun", "<= 0.4")}, "MiB")
    return rows


def _compared(
    case: str,
    size: int,
    script: Path,
    aims: tuple[str, str],
    environs: tuple[dict[str, str], dict[str, str]],
    rounds: int,
) -> list[Row]:
    """``aims``, ``environs``: of the command alone, and after ``mlaunch warm``."""
    alone, warm = environs
    work = [f"--nproc-per-node={size}", str(script)]
    contestants = {name: _timed([*command, *work], alone) for name, command in _COMMANDS.items()}
    contestants[_WARM] = _timed([*_COMMANDS["mlaunch run"], *work], warm)
    bounds = {name: ("torchrun", aim) for name, aim in zip(("mlaunch run", _WARM), aims, strict=True)}
    return compare(case, alternate(contestants, rounds), bounds, "s")


def _timed(command: list[str], environ: dict[str, str]) -> Callable[[], float]:
    return lambda: seconds(lambda: _output(command, environ))


def _memory(command: list[str], environ: dict[str, str]) -> float:
    return sum(map(float, _output(command, environ).split()))


def _output(command: list[str], environ: dict[str, str]) -> str:
    return subprocess.run(command, check=True, env=environ, capture_output=True, encoding="utf-8").stdout
