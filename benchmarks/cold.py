"""A whole script in a fresh interpreter, from its start to its end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.kept import kept
from benchmarks.measure import Row, alternate, compare, seconds

_OURS = """
{first}
import torch
from benchmarks.work import reduce_once
from mlaunch import launcher
assert launcher(reduce_once, {size}{options})() == [{size}.0] * {size}
"""
_TORCHRUN = """
from benchmarks.work import join_by_environment
import os
assert join_by_environment() == float(os.environ["WORLD_SIZE"])
"""
_WARM = "mlaunch, mlaunch warm"
_ROOT = Path(__file__).resolve().parent.parent


def run(rounds: int) -> list[Row]:
    rows: list[Row] = []
    alone = {**os.environ, "PYTHONPATH": str(_ROOT), "MLAUNCH_WARM": "0"}
    with tempfile.TemporaryDirectory() as folder, kept({**alone, "MLAUNCH_WARM": ""}) as warm:
        for size, bounds in (
            (2, ("<= 1.0", "<= 0.55", "<= 0.6", "<= 0.5")),
            (8, ("<= 0.5", "<= 0.3", "<= 0.35", "")),
        ):
            variants = {
                "mlaunch": _OURS.format(first="", size=size, options=""),
                "mlaunch, fork": _OURS.format(first="", size=size, options=", start_method='fork'"),
                "mlaunch, warm_up()": _OURS.format(first="import mlaunch; mlaunch.warm_up()", size=size, options=""),
            }
            contestants = {
                name: _timed([sys.executable, _script(folder, f"{index}_{size}", text)], alone)
                for index, (name, text) in enumerate(variants.items())
            }
            torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}"]
            contestants["torchrun"] = _timed([*torchrun, _script(folder, "torchrun", _TORCHRUN)], alone)
            contestants[_WARM] = _timed([sys.executable, _script(folder, f"0_{size}", variants["mlaunch"])], warm)
            aims = {name: ("torchrun", bound) for name, bound in zip([*variants, _WARM], bounds, strict=True)}
            rows += compare(f"cold script, {size} ranks", alternate(contestants, rounds), aims, "s")
    return rows


def _script(folder: str, name: str, text: str) -> str:
    path = Path(folder, f"{name}.py")
    path.write_text(text, encoding="utf-8")
    return str(path)


def _timed(command: list[str], environ: dict[str, str]) -> Callable[[], float]:
    def once() -> None:
        subprocess.run(command, check=True, env=environ, stderr=subprocess.DEVNULL)

    return lambda: seconds(once)
