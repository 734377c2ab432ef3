"""The activity of a process and its children, from the kernel's counts: a process works if they change."""

from __future__ import annotations

import contextlib
import os

_PAGE = os.sysconf("SC_PAGE_SIZE")  # bytes
_TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds
# Numbers of x86_64; unknown elsewhere.
_CALLS = {"0": "reading", "17": "reading", "19": "reading", "1": "writing", "18": "writing", "20": "writing",
          "74": "flushing", "75": "flushing"}  # fmt: skip
_OWN, _WAITED_FOR = slice(11, 13), slice(13, 15)  # times in user and kernel mode, behind the name in /proc/PID/stat


def activity(pid: int) -> dict[str, float]:
    """Return seconds, bytes and counts since the process began.

    ``switches``: how often its main thread has begun to wait, as it does for each packet of a socket; ``main``: seconds
    that it has run, or waited for a CPU; ``threads``: that all its threads have run; ``children``: that its descendants
    have run, including those that are gone; ``bytes``: read and written by all of them.
    """
    below = _descendants(pid)
    own = _times(pid)
    return {
        "switches": _switches(pid),
        "main": _scheduled(pid),
        "threads": sum(own[:2]),
        "children": sum(own[2:]) + sum(sum(_times(child)) for child in below),
        "bytes": sum(map(_bytes, [pid, *below])),
    }


def resident(pid: int) -> int:
    """Return the bytes of physical memory that a process holds, with shared memory; 0 if it is gone."""
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def asleep(pid: int) -> str:
    """Return the place in the kernel where the main thread sleeps, "asleep" if unknown; "" if it runs."""
    state = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1]
    if state != ["S"]:
        return ""
    place = _read(f"/proc/{pid}/wchan")
    return "asleep" if place in {"", "0"} else place


def children_of(pid: int) -> list[int]:
    """Return the children of all its threads."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _read(f"/proc/{pid}/task/{task}/children").split())
    return found


def file_of(pid: int) -> str:
    """Return the file that a process waits for in the kernel: ", reading /data/shard-7"; "" if unknown."""
    number, *arguments = _read(f"/proc/{pid}/syscall").split() or [""]
    doing = _CALLS.get(number) if os.uname().machine == "x86_64" else None
    with contextlib.suppress(OSError, IndexError):
        return f", {doing} {os.readlink(f'/proc/{pid}/fd/{int(arguments[0], 16)}')}" if doing else ""
    return ""


def _descendants(pid: int) -> list[int]:
    found = children_of(pid)
    for child in found:  # which grows meanwhile
        found += children_of(child)
    return found


def _switches(pid: int) -> int:
    rows = dict(row.split(":", 1) for row in _read(f"/proc/{pid}/task/{pid}/status").splitlines())
    return int(rows.get("voluntary_ctxt_switches", 0))


def _scheduled(pid: int) -> float:
    ran, waited, *_ = map(int, _read(f"/proc/{pid}/task/{pid}/schedstat").split() or ("0", "0"))
    # Waiting for a CPU counts as work: otherwise, on a busy machine, a computing rank would seem to do nothing.
    return (ran + waited) / 1e9


def _times(pid: int) -> list[float]:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return [int(ticks) * _TICK for ticks in (*fields[_OWN], *fields[_WAITED_FOR])] or [0.0] * 4


def _bytes(pid: int) -> int:
    rows = dict(row.split(": ") for row in _read(f"/proc/{pid}/io").splitlines())
    return int(rows.get("rchar", 0)) + int(rows.get("wchar", 0))


def _read(path: str) -> str:
    """Return the file's content; "" if the process is gone, or another user's."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""
