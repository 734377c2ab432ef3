"""Leftovers of ranks: processes, which the agent reaps as they end, and files in /dev/shm, which it reports."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mlaunch.base.deadline import NEVER

if TYPE_CHECKING:
    from mlaunch.agent.supervision import System
    from mlaunch.base.orphans import ChildEnds

_WATCH_DELAY = 0.05  # seconds into a launch: shorter ones are spared the work
_PLACE = "/dev/shm"
# torch's and joblib's have their maker's number; multiprocessing's blocks and NCCL's have none.
_DRAWN = re.compile(r"(?:torch_(?P<torch>\d+)_\w+|joblib_memmapping_folder_(?P<joblib>\d+)_\w+|psm_\w{6,}|nccl-\w{6})")
_CLEANERS = {"torch": b"torch_shm_manager", "joblib": b".resource_tracker import main;"}  # in command lines
_TICK = 0.05  # seconds: files are stamped with a clock that is as much behind


class Adopted:
    """Processes that ranks have started and left: the agent is their new parent, and reaps each when it ends.

    A rank that runs ``os.system("command &")`` at each step would fill the table of processes otherwise. ``own``: the
    children whose statuses others take.
    """

    def __init__(self, system: System, own: Callable[[], Collection[int]]) -> None:
        self._system = system
        self._own = own
        self._ends: ChildEnds | None = None
        self.due = system.clock() + _WATCH_DELAY  # when ``reap`` begins to watch; ``NEVER``: it does

    def fds(self) -> list[int]:
        return [] if self._ends is None else [self._ends.fileno()]

    def reap(self, ready: Collection[int]) -> None:
        """Reap what has ended, if some child has."""
        if self.due < NEVER and self._system.clock() >= self.due:
            self.due, self._ends = NEVER, self._system.child_ends()
            self._system.reap(self._own())  # those that ended before
        elif self._ends is not None and self._ends.fileno() in ready:
            self._ends.take()  # first: a process that ends from now on is reported again
            self._system.reap(self._own())

    def close(self) -> None:
        """Stop watching."""
        self.due = NEVER
        if self._ends is not None:
            self._ends.close()
            self._ends = None


class SharedNames:
    """The files that a launch has left in ``place``. Made before the first process of the launch.

    The system does not note who made a file there. So the only names that count are those that libraries draw, of files
    that came during the launch, belong to this user, and are used by no process.
    """

    def __init__(self, place: str = _PLACE) -> None:
        self._place = place
        self._begun = time.time() - _TICK
        # Most launches put nothing there, and need not look through all of /proc for who uses it.
        self._changed = self._stamp()

    def left(self) -> tuple[list[str], int]:
        """Return the paths of what is left, and how many bytes that takes. Look at nothing if no name has changed."""
        if self._stamp() == self._changed:
            return [], 0
        found: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for name in os.listdir(self._place):
                with contextlib.suppress(OSError):
                    if self._is_new(name):
                        found[f"{self._place}/{name}"] = _size(f"{self._place}/{name}")
        for path in _used(found) if found else []:
            del found[path]
        return sorted(found), sum(found.values())

    def _stamp(self) -> int:
        with contextlib.suppress(OSError):
            return os.stat(self._place).st_mtime_ns
        return 0

    def _is_new(self, name: str) -> bool:
        drawn = _DRAWN.fullmatch(name)
        if drawn is None:
            return False
        # Not of a link's target: another user may have made the link, and the target may be a home on a slow disk.
        status = os.lstat(f"{self._place}/{name}")
        kept = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
        if not kept or status.st_uid != os.getuid() or status.st_ctime < self._begun:
            return False
        return not any(_is_cared_for(kind, int(pid)) for kind, pid in drawn.groupdict().items() if pid)


def _is_cared_for(kind: str, maker: int) -> bool:
    """True if a file's maker is alive, or a program that may still remove what the maker has left."""
    return os.path.exists(f"/proc/{maker}") or any(_CLEANERS[kind] in _read(pid, "cmdline") for pid in _own_processes())


def _size(path: str) -> int:
    inside = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]  # follows no link
    found = [os.lstat(file) for file in (path, *inside)]
    return sum(status.st_size for status in found if stat.S_ISREG(status.st_mode))


def _used(paths: Iterable[str]) -> set[str]:
    """Return those that a process of this user has mapped or open, or has a file in."""
    wanted = set(paths)
    used: set[str] = set()
    for pid in _own_processes():
        text = os.fsdecode(_read(pid, "maps"))
        held = {path for path in wanted if path in text}
        used |= held | {path for path in wanted for file in _open_files(pid) if file.startswith(path)}
    return used


def _own_processes() -> Iterator[str]:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                yield pid


def _read(pid: str, what: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{what}").read_bytes()
    return b""


def _open_files(pid: str) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found
