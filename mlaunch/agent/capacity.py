"""Room for ranks on this machine: in its memory, and in its limits of processes and threads.

What cannot fit is refused before the first rank is forked; what may fit is watched while it is forked. The kernel says
how much there is, of the machine and of the cgroups (version 1 or 2) that this process is in.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
from collections.abc import Sequence
from pathlib import Path

from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.text import in_bytes

# What a rank takes before it runs anything. Measured with torch 2.13 and gloo: 4.5 to 6 MiB and 5 threads; a script
# that joins no group has 2. So what is refused could not have started.
_LEAST_MEMORY = 4 * 2**20  # bytes
_THREADS, _THREADS_OF_A_SCRIPT = 4, 2
# A machine that has less left than either, these bytes and a 20th of its memory, soon stands still.
_RESERVE, _SHARE = 2**30, 20
_SMALL = 64 * 2**20  # bytes that are not worth a look, which each call would take
_ROOM_FOR_USERS = 4  # the user's processes are counted where the ranks take more than this part of their limit


@frozen_record
class Kernel:
    """The files in which the kernel says what there is."""

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")

    def memory(self) -> dict[str, int]:
        """Return the figures of meminfo, in bytes; {} if they are not to be had."""
        found = {}
        with contextlib.suppress(OSError, ValueError):
            for line in (self.proc / "meminfo").read_text(encoding="ascii").splitlines():
                name, _, rest = line.partition(":")
                found[name] = int(rest.split()[0]) * 1024
        return found


_HERE = Kernel()


def lacks(ranks: int, *, script: bool = False, kernel: Kernel = _HERE) -> str:
    """Return what so many ranks lack, with the figures; "" if they may have room. ``script``: they run a command."""
    tasks = ranks * (_THREADS_OF_A_SCRIPT if script else _THREADS)
    return _lacks_pids(ranks, tasks, kernel) or _lacks_processes(ranks, tasks, kernel) or _lacks_memory(ranks, kernel)


def runs_short(kernel: Kernel = _HERE) -> str:
    """Return how little memory the machine has left; "" if it has enough."""
    found = kernel.memory()
    total, left = found.get("MemTotal", 0), _available(found)
    if not total or left is None or left >= min(total / _SHARE, _RESERVE):
        return ""
    return f"{in_bytes(left)} of {in_bytes(total)} of memory are left"


def why_no_fork(error: OSError, kernel: Kernel = _HERE) -> str:
    """Return why a process could not be forked, by the kernel's word and the limit that was met, if one was."""
    for group in _pid_groups(kernel):
        most, taken = _read(group / "pids.max"), _read(group / "pids.current")
        if most is not None and taken is not None and taken >= most:
            return f"{error.strerror}: the cgroup {group} allows {most} processes and threads (pids.max)"
    if short := runs_short(kernel):
        return f"{error.strerror}: {short}"
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limited = soft != resource.RLIM_INFINITY and os.getuid() != 0
    limit = f"this user may have {soft} processes and threads (ulimit -u)" if limited else "see kernel.threads-max"
    return f"{error.strerror}: {limit}"


def _lacks_pids(ranks: int, tasks: int, kernel: Kernel) -> str:
    for group in _pid_groups(kernel):
        most, taken = _read(group / "pids.max"), _read(group / "pids.current") or 0
        if most is not None and taken + tasks > most:
            return (
                f"{ranks} rank(s) take {tasks} processes and threads at least, and the cgroup {group} allows {most} "
                f"(pids.max), of which {taken} are taken; give fewer ranks, or raise that limit"
            )
    return ""


def _lacks_processes(ranks: int, tasks: int, kernel: Kernel) -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    # The kernel counts all of a user's, in all containers, which takes long to do here; root it does not limit.
    if soft == resource.RLIM_INFINITY or os.getuid() == 0 or tasks * _ROOM_FOR_USERS <= soft:
        return ""
    taken = _tasks_of_user(kernel)
    if taken + tasks <= soft:
        return ""
    most = "" if hard in {soft, resource.RLIM_INFINITY} else f", up to {hard}"
    return (
        f"{ranks} rank(s) take {tasks} processes and threads at least, and this user may have {soft}, of which {taken} "
        f"are taken; give fewer ranks, or raise ulimit -u{most}"
    )


def _lacks_memory(ranks: int, kernel: Kernel) -> str:
    needed = ranks * _LEAST_MEMORY
    if needed <= _SMALL:
        return ""
    available = _available(kernel.memory())
    limits = [limit for group in _memory_groups(kernel) if (limit := _memory_limit(group)) is not None]
    most = min([*limits, *([] if available is None else [available])], default=needed)
    if needed <= most:
        return ""
    return (
        f"{ranks} ranks take {in_bytes(needed)} of memory at least, before they run anything, and "
        f"{in_bytes(most)} are available; give fewer ranks"
    )


def _available(found: dict[str, int]) -> int | None:
    """Return what processes can have of the memory, in bytes; None if that is not known."""
    return found["MemAvailable"] + found.get("SwapFree", 0) if "MemAvailable" in found else None


def _tasks_of_user(kernel: Kernel) -> int:
    found = 0
    for process in kernel.proc.iterdir() if kernel.proc.is_dir() else ():
        with contextlib.suppress(OSError):
            if process.name.isdecimal() and process.stat().st_uid == os.getuid():
                found += len(os.listdir(process / "task"))
    return found


def _memory_limit(group: Path) -> int | None:
    """Return a cgroup's limit in bytes; None: it has none. Version 1 says that by a number of 2**63, about."""
    names = ("memory.max", "memory.limit_in_bytes")
    return next((limit for name in names if (limit := _read(group / name)) is not None and limit < 2**60), None)


def _read(path: Path) -> int | None:
    """Return the number in a file; None if it says "max", or is not there."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return None


@functools.lru_cache(4)  # the fork server looks once for all its agents
def _pid_groups(kernel: Kernel) -> Sequence[Path]:
    return [group for group in _groups(kernel, "pids") if (group / "pids.max").exists()]


def _memory_groups(kernel: Kernel) -> Sequence[Path]:
    return _groups(kernel, "memory")


def look() -> None:
    """Look for the cgroups once, for all forks of this process."""
    _pid_groups(_HERE)


def _groups(kernel: Kernel, controller: str) -> list[Path]:
    """Return the directories of this process's cgroup and those around it, of that controller."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for line in (kernel.proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = kernel.cgroups / controller if controllers else kernel.cgroups
            own = Path(path.strip("/"))
            found += [root / below for below in (own, *own.parents)]
    return found
