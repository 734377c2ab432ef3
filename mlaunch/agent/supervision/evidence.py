"""What the system knows of a rank that was killed: the likely reason, worded as likelihood."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from pathlib import Path

from mlaunch.base.text import in_bytes

_CGROUPS = Path("/sys/fs/cgroup")


class Evidence:
    """Made when the ranks start, asked when one has died."""

    def __init__(self, own_cgroup: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS) -> None:
        self._counter = _find_counter(own_cgroup, root)
        # Counted since the launch began: the counter is of the cgroup, and may have risen for others long before.
        self._kills_before = self._kills()

    def hints(self, exitcode: int, peak: int) -> tuple[str, ...]:
        """Lines for a report. ``peak``: the most memory the rank had resident, in bytes."""
        if exitcode == -signal.SIGKILL:
            return (*self._out_of_memory(), f"its peak memory was {in_bytes(peak)}")
        if exitcode == -signal.SIGBUS:
            # The kernel sends SIGBUS where a page of a full tmpfs is written to, as a data loader's workers do.
            free = os.statvfs("/dev/shm")
            return (f"/dev/shm has {in_bytes(free.f_bavail * free.f_frsize)} free: a full one is a likely reason",)
        return ()

    def _out_of_memory(self) -> tuple[str, ...]:
        risen = self._kills() - self._kills_before
        if risen <= 0:
            return ()
        return (
            f"the oom_kill counter of the cgroup ({self._counter}) rose by {risen} while this rank ran: "
            f"it was probably killed for lack of memory",
        )

    def _kills(self) -> int:
        if self._counter is not None:
            with contextlib.suppress(OSError, ValueError):
                for line in self._counter.read_text(encoding="utf-8").splitlines():
                    name, _, value = line.partition(" ")
                    if name == "oom_kill":
                        return int(value)
        return 0


@functools.lru_cache(4)  # the fork server looks once for all its agents
def _find_counter(own_cgroup: Path, root: Path) -> Path | None:
    """Finds the file that counts this process's cgroup's out-of-memory kills: of version 1 or 2 of the interface."""
    with contextlib.suppress(OSError):
        for line in own_cgroup.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            below = path.strip("/")
            for candidate in (
                root / "memory" / below / "memory.oom_control" if "memory" in controllers.split(",") else None,
                root / below / "memory.events" if not controllers else None,
            ):
                if candidate is not None and candidate.exists():
                    return candidate
    return None
