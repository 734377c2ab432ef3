"""Files that the processes of a launch have left in /dev/shm, once nobody is there any more to remove them.

The system does not note who made a file there. So the only names that count are those that libraries draw, of files
that came during the launch, belong to this user, and are used by no process: checkpoints of others are none of ours.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_PLACE = "/dev/shm"
# torch's and joblib's have their maker's number; multiprocessing's blocks and NCCL's have none.
_DRAWN = re.compile(r"(?:torch_(?P<torch>\d+)_\w+|joblib_memmapping_folder_(?P<joblib>\d+)_\w+|psm_\w{6,}|nccl-\w{6})")
_TIDY_UP = {"torch": b"torch_shm_manager", "joblib": b".resource_tracker import main;"}
_TICK = 0.05  # seconds: files are stamped with a clock that is as much behind


class SharedNames:
    """Made before the first process of a launch. ``place``: where names are looked for."""

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
    """True if a file's maker lives, or a program that may yet remove what the maker has left."""
    return os.path.exists(f"/proc/{maker}") or any(_TIDY_UP[kind] in _read(pid, "cmdline") for pid in _own_processes())


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
