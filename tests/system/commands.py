"""Runs ``mlaunch run`` and torchrun on scripts, as a shell would."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tests.conftest import ROOT
from tests.imported import IMPORTED
from tests.users import users_environ

MLAUNCH = [IMPORTED, "-m", "mlaunch", "run"]
FRESH = [sys.executable, *MLAUNCH[1:]]  # for what counts as torch is imported
TORCHRUN = [IMPORTED, "-m", "torch.distributed.run"]
LAUNCHERS = {"mlaunch": MLAUNCH, "torchrun": TORCHRUN}
T, R = TypeVar("T"), TypeVar("R")


def environment(**changes: str) -> dict[str, str]:
    return {**users_environ(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **changes}


def start(cwd: Path, *args: str, command: list[str] = MLAUNCH, **changes: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, *args],
        cwd=cwd,
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    cwd: Path, *args: str, command: list[str] = MLAUNCH, stdin: str | None = None, **changes: str
) -> subprocess.CompletedProcess[str]:
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run(
        [*command, *args],
        cwd=cwd,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def at_once(function: Callable[[T], R], each: Iterable[T]) -> list[R]:
    """As map, but a machine with several cores is not left idle."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(function, each))


def write(folder: Path, text: str, name: str = "train.py") -> str:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return name
