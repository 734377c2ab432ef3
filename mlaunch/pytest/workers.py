"""What the workers of pytest-xdist share: the cores of this machine."""

from __future__ import annotations

import os
import warnings

import pytest

from mlaunch.pytest.mark import Shape
from mlaunch.rank.setup import device

_THREADS = "OMP_NUM_THREADS"


def count() -> int:
    """Returns how many workers run tests at the same time; 1 without xdist."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def share_of_cores(size: int) -> dict[str, str] | None:
    """Returns what gives each rank its share of the cores where other workers have ranks, too."""
    if count() == 1 or _THREADS in os.environ:
        return None
    return {_THREADS: str(device.threads_of(size * count()))}


def warn_of_cores(shape: Shape) -> None:
    """Warns where the ranks of all workers are more than the cores. One worker does for all, as its ranks begin."""
    cores, first = device.usable_cpus(), os.environ.get("PYTEST_XDIST_WORKER") == "gw0"
    if first and shape.device_type == "cpu" and count() * shape.size > cores:
        told = (
            f"{count()} workers with {shape.size} ranks each share {cores} cores, and wait for each other; "
            f"-n {max(1, cores // shape.size)} is likely to be faster"
        )
        warnings.warn(pytest.PytestWarning(told), stacklevel=1)
