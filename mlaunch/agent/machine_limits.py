"""The limits of this machine: whether they have room for the ranks, and which of them a killed rank has met.

Ranks that cannot fit are refused before the first one is forked; if they may fit, the memory is watched while they are
forked. The kernel says how much there is, of the machine and of the cgroups (version 1 or 2) of this process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlaunch.base.text import in_bytes
from mlaunch.protocol.failures import OOM_COUNTER

# What a rank takes before it runs anything. Measured with torch 2.13 and gloo: 4.5 to 6 MiB and 5 threads; a script
# that joins no group has 2. So what is refused could not have started.
_LEAST_MEMORY = 4 * 2**20  # bytes
_THREADS, _THREADS_OF_A_SCRIPT = 4, 2
# A machine that has less left than either, these bytes and a 20th of its memory, is soon unusable.
_RESERVE, _SHARE = 2**30, 20
_SMALL = 64 * 2**20  # bytes that are not worth a check, which each call would take
_ROOM_FOR_USERS = 4  # the user's processes are counted where the ranks take more than this part of their limit
_CLOSE = 0.2  # seconds of CPU by which rusage and the kernel's own clock may differ
_LIMITS = resource.RLIMIT_CPU, resource.RLIMIT_FSIZE
_CGROUPS = Path("/sys/fs/cgroup")
# A controller, and the files that count for it: of version 1 and 2 of the interface.
_MEMORY = "memory", "memory.oom_control", "memory.events"
_PIDS = "pids", "pids.events", "pids.events"


@dataclass(eq=False)  # a key of caches, which each launch looks into
class Kernel:
    """The files in which the kernel says what there is."""

    proc: Path = Path("/proc")
    cgroups: Path = _CGROUPS

    def memory(self) -> dict[str, int]:
        """Return the figures of meminfo, in bytes; {} if they cannot be read."""
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
    return f"only {in_bytes(left)} of {in_bytes(total)} of memory is left"


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
                f"{ranks} rank(s) need at least {tasks} processes and threads, but the cgroup {group} allows {most} "
                f"(pids.max), of which {taken} are in use; give fewer ranks, or raise that limit"
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
        f"{ranks} rank(s) need at least {tasks} processes and threads, but this user may have {soft}, of which {taken} "
        f"are in use; give fewer ranks, or raise ulimit -u{most}"
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
        f"{ranks} ranks need at least {in_bytes(needed)} of memory before they run anything, but only "
        f"{in_bytes(most)} is available; give fewer ranks"
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


def find_cgroups() -> None:
    """Find the cgroups once, for all forks of this process."""
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


class Evidence:
    """The likely reasons for the death of a rank. Made when the ranks start, asked when one has died."""

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
            # The kernel sends SIGBUS to who writes to a page of a full tmpfs, as a data loader's workers do.
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
    """Return the limits of a process, which may have ended but is not reaped; {} if they cannot be read."""
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
