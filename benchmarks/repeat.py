"""500 calls in a row: does anything grow?"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from benchmarks.measure import Row
from benchmarks.work import reduce_once
from mlaunch import launcher
from mlaunch.caller.warm_server import warm_server

_CALLS = 500


def _state() -> dict[str, float]:
    server = warm_server.get(os.environ).pid
    return {
        "processes": len(Path(f"/proc/{server}/task/{server}/children").read_text(encoding="utf-8").split()),
        "fds of caller": len(os.listdir("/proc/self/fd")),
        "fds of fork server": len(os.listdir(f"/proc/{server}/fd")),
        "threads": threading.active_count(),
        "MiB of caller": rss(os.getpid()),
        "MiB of fork server": rss(server),
    }


def rss(pid: int) -> float:
    """The resident memory of a process, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/{pid}/status has no VmRSS")


def run(rounds: int) -> list[Row]:
    del rounds
    ours = launcher(reduce_once, 2)
    for _ in range(50):
        ours()
    before = _state()
    for _ in range(_CALLS):
        ours()
    after = _state()
    return [
        Row(f"growth over {_CALLS} calls", name, after[name] - before[name], f"(from {before[name]:.0f})")
        for name in before
    ]
