"""Shares of workers of pytest-xdist: the machine's cores, and its accelerators, which they lease."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence

import pytest

from mlaunch.caller import interrupts
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.server.warm_server import warm_server
from mlaunch.leases.caller import LeaseRequest, request_of
from mlaunch.leases.caller.acquisition import Acquisition, DeviceLease, standing
from mlaunch.leases.caller.lease_directory import place
from mlaunch.pytest.caller.mark import Shape
from mlaunch.rank.setup import device

_THREADS = "OMP_NUM_THREADS"
_WORKER = "PYTEST_XDIST_WORKER"
_TERM = 10.0  # seconds that a worker keeps devices that others wait for: new ranks take seconds to start on them


def count() -> int:
    """Return how many workers run tests at the same time; 1 without xdist."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def share_of_cores(size: int) -> dict[str, str]:
    """Return the variables that give each rank its share of the cores; none without other workers."""
    if count() == 1 or _THREADS in os.environ:
        return {}
    return {_THREADS: str(device.threads_of(size * count()))}


def warn_of_cores(shape: Shape) -> None:
    """Warn if all workers together have more ranks than cores. Only the first worker warns, as its ranks begin."""
    cores, first = device.usable_cpus(), os.environ.get(_WORKER) == "gw0"
    if first and shape.device_type == "cpu" and count() * shape.size > cores:
        told = (
            f"{count()} workers with {shape.size} ranks each share {cores} cores, and wait for each other; "
            f"-n {max(1, cores // shape.size)} is likely to be faster"
        )
        warnings.warn(pytest.PytestWarning(told), stacklevel=1)


class WorkerDevices:
    """The accelerators of one set of ranks, which no other worker uses meanwhile; none for ranks on CPUs.

    ``devices``: their numbers; ``environ``: the variables by which ranks know them.
    """

    def __init__(self, shape: Shape, patience: float) -> None:
        """Wait up to ``patience`` seconds for as many devices as a shape needs.

        Raises:
            ValueError: This machine does not have so many.
            pytest.fail.Exception: Others kept them for that long.
        """
        self.devices: Sequence[int] | None = None
        self.environ: Mapping[str, str] = {}
        self._lease: DeviceLease | None = None
        if count() == 1 or shape.device_type == "cpu":
            return
        options = Options().replaced({"n_gpus": shape.size, "device_type": shape.device_type, "lease": True})
        name = f"pytest's worker {os.environ.get(_WORKER, '')}"
        request = request_of(options, warm_server.get(os.environ), os.environ, name)
        if request.numbers is not None:  # else the ranks are on CPUs
            # One set at a time: two workers that keep devices and wait for more could wait for each other.
            self._lease = _wait(request, patience)
            granted = request.granted(self._lease)
            self.devices = granted.options.devices
            self.environ = {name: granted.environ[name] for name in granted.of_call}
        self._since = time.monotonic()

    def are_due(self) -> bool:
        """True if another worker waits for these devices, and this one has had them for long enough."""
        if self._lease is None or time.monotonic() - self._since < _TERM:
            return False
        names = set(self._lease.names)
        return any(names & set(waiting.get("names", ())) for waiting in standing(place(os.environ))[1])

    def close(self) -> None:
        """Give the devices back."""
        if self._lease is not None:
            self._lease.close()


def _wait(request: LeaseRequest, patience: float) -> DeviceLease:
    acquisition = request.begin()
    end = time.monotonic() + patience
    try:
        while (lease := acquisition.step()) is None:
            if (left := end - time.monotonic()) <= 0:
                raise pytest.fail.Exception(_told(request, acquisition, patience), pytrace=False)
            interrupts.wait_readable(acquisition.fds(), min(left, acquisition.timeout() or left))
    finally:
        acquisition.close()
    try:
        for delay in request.memory_back(lease):
            interrupts.wait_readable(delay.fds, delay.timeout)
    except BaseException:
        lease.close()
        raise
    return lease


def _told(request: LeaseRequest, acquisition: Acquisition, patience: float) -> str:
    return (
        f"{request.waits_for(acquisition)}: it did not get them within {patience:g} s (ranks_deadline for each of "
        f"{count()} workers); run fewer workers (-n), or see who has the devices: mlaunch ps"
    )
