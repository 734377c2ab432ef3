"""The likely reason for the death of a rank that was killed, as the system knows it."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
from collections.abc import Mapping
from pathlib import Path

from mlaunch.base.text import in_bytes
from mlaunch.protocol.failures import OOM_COUNTER

_CGROUPS = Path("/sys/fs/cgroup")
_CLOSE = 0.2  # seconds of CPU: by so much may rusage and the kernel's own clock differ
_LIMITS = resource.RLIMIT_CPU, resource.RLIMIT_FSIZE


class Evidence:
    """Made when the ranks start, asked when one has died."""

    def __init__(self, own_cgroup: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS) -> None:
        # Counted since the launch began: the counters are of the cgroup, and may have risen for others long before.
        self._killed = _Counter(_find_counter(own_cgroup, root, *_MEMORY), "oom_kill")
        self._refused = _Counter(_find_counter(own_cgroup, root, *_PIDS), "max")

    def hints(
        self, exitcode: int, usage: resource.struct_rusage, limits: Mapping[int, tuple[int, int]]
    ) -> tuple[str, ...]:
        """Return lines for a report. ``limits``: the rank's own, soft and hard, as ``limits_of`` reads them."""
        if exitcode == -signal.SIGXCPU:  # the kernel has raised the soft limit by a second
            return (f"it had used {usage.ru_utime + usage.ru_stime:.0f} s of CPU, its soft limit (ulimit -t)",)
        if exitcode == -signal.SIGXFSZ and resource.RLIMIT_FSIZE in limits:
            return (f"its limit is {limits[resource.RLIMIT_FSIZE][0]} bytes in a file (ulimit -f)",)
        if exitcode == -signal.SIGKILL:
            peak = f"its peak memory was {in_bytes(usage.ru_maxrss * 1024)}"
            return (*self._out_of_memory(), *(self._out_of_time(usage, limits) or (peak,)))
        if exitcode == -signal.SIGBUS:
            # The kernel sends SIGBUS where a page of a full tmpfs is written to, as a data loader's workers do.
            free = os.statvfs("/dev/shm")
            return (f"/dev/shm has {in_bytes(free.f_bavail * free.f_frsize)} free: a full one is a likely reason",)
        return self._out_of_pids() if exitcode == -signal.SIGABRT else ()

    def _out_of_memory(self) -> tuple[str, ...]:
        if (risen := self._killed.risen()) <= 0:
            return ()
        return (
            f"the {OOM_COUNTER} of the cgroup ({self._killed.file}) rose by {risen} while this rank ran: "
            f"it was probably killed for lack of memory",
        )

    def _out_of_time(self, usage: resource.struct_rusage, limits: Mapping[int, tuple[int, int]]) -> tuple[str, ...]:
        used, (_, hard) = usage.ru_utime + usage.ru_stime, limits.get(resource.RLIMIT_CPU, (0, resource.RLIM_INFINITY))
        if hard == resource.RLIM_INFINITY or used < hard - _CLOSE:
            return ()
        return (f"it had used {used:.0f} s of CPU, and the kernel kills it at its hard limit of {hard} s (ulimit -t)",)

    def _out_of_pids(self) -> tuple[str, ...]:
        if (risen := self._refused.risen()) <= 0:
            return ()
        return (
            f"the pids limit of the cgroup ({self._refused.file}) was met {risen} times while this rank ran: "
            f"it could probably start no more threads",
        )


def limits_of(pid: int) -> dict[int, tuple[int, int]]:
    """Return the limits of a process, which may have ended but is not reaped; none where they cannot be read."""
    with contextlib.suppress(OSError):
        return {limit: resource.prlimit(pid, limit) for limit in _LIMITS}
    return {}


class _Counter:
    """A line of a cgroup's file, and how far it has risen since this was made."""

    def __init__(self, file: Path | None, name: str) -> None:
        self.file, self._name = file, name
        self._before = self._value()

    def risen(self) -> int:
        return self._value() - self._before

    def _value(self) -> int:
        if self.file is not None:
            with contextlib.suppress(OSError, ValueError):
                for line in self.file.read_text(encoding="utf-8").splitlines():
                    name, _, value = line.partition(" ")
                    if name == self._name:
                        return int(value)
        return 0


# A controller, and the files that count for it: of version 1 and 2 of the interface.
_MEMORY = "memory", "memory.oom_control", "memory.events"
_PIDS = "pids", "pids.events", "pids.events"


@functools.lru_cache(4)  # the fork server looks once for all its agents
def _find_counter(own_cgroup: Path, root: Path, controller: str, first: str, second: str) -> Path | None:
    """Return the file that counts this process's cgroup's events."""
    with contextlib.suppress(OSError):
        for line in own_cgroup.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            below = path.strip("/")
            for candidate in (
                root / controller / below / first if controller in controllers.split(",") else None,
                root / below / second if not controllers else None,
            ):
                if candidate is not None and candidate.exists():
                    return candidate
    return None
