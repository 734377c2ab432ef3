"""Many processes that want leases of the same devices, some of which are killed: nothing double, nothing out of order.

    python -m tests.lease_storm [acquisitions] [processes]

Each process takes leases one after the other, of one to four of eight devices, and holds each for a moment. A third of
them are killed at random moments, waiting or holding, and others take their place. What is double is found by other
means than the lease's: a socket in the abstract namespace for each device, which one process can bind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import random
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from mlaunch.base.linux import wait_readable
from mlaunch.leases.caller.acquisition import Acquisition, DeviceLease, Wish

DEVICES = [f"gpu{number}" for number in range(8)]
_ABOVE = 500  # the number of a descriptor that is above those of a lease


@dataclass
class Found:
    """What came of it."""

    taken: int
    killed: int
    double: int
    out_of_order: int


class Noted(Acquisition):
    """Notes each lease while nobody else can take one."""

    log = -1

    def _take(self) -> DeviceLease | None:
        lease = super()._take()
        if lease is not None:
            os.write(self.log, f"took {self.number} {' '.join(self._wish.names)}\n".encode())
        return lease


def storm(folder: Path, acquisitions: int, processes: int, seed: int = 1) -> Found:
    """Makes one, and waits until it is over."""
    chance, log = random.Random(seed), os.open(folder / "log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    running: set[int] = set()
    killed = 0
    while (taken := _count(folder / "log", "took")) < acquisitions or 3 * killed < acquisitions:
        while len(running) < processes:
            running.add(_fork(folder / "leases", log, chance.getrandbits(32)))
        if 2 * killed < taken:  # a third of all that come
            victim = chance.choice(sorted(running))
            os.kill(victim, signal.SIGKILL)
            running.discard(victim)
            killed += 1
            os.waitpid(victim, 0)
        else:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            running.discard(pid)
            signal.sigtimedwait([], 0.001)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(log)
    lines = (folder / "log").read_text(encoding="utf-8").splitlines()
    words = [line.split() for line in lines if line.startswith("took ")]
    taken = [(int(number), {*names}) for _, number, *names in words]
    # Who wants none of the same is in nobody's way, and may be first.
    late = sum(
        one > other and bool(of_one & of_other) for (one, of_one), (other, of_other) in itertools.combinations(taken, 2)
    )
    return Found(len(taken), killed, sum(line == "double" for line in lines), late)


def _count(path: Path, word: str) -> int:
    return path.read_text(encoding="utf-8").count(word)


def _fork(directory: Path, log: int, seed: int) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            Noted.log = log
            _live(directory, log, random.Random(seed))
            code = 0
        finally:
            os._exit(code)
    return pid


def _live(directory: Path, log: int, chance: random.Random) -> None:
    for _ in range(8):
        wanted = chance.sample(DEVICES, chance.randint(4, 8))
        acquisition = Noted(directory, Wish(wanted, chance.randint(1, 4), "storm"))
        while (lease := acquisition.step()) is None:
            wait_readable(acquisition.fds())
        acquisition.close()
        bound = [_bind(directory, name, log) for name in lease.names]
        signal.sigtimedwait([], chance.random() / 500)
        for one in bound:
            one.close()
        lease.close()


def _bind(directory: Path, name: str, log: int) -> socket.socket:
    """Binds what one process can. A killed process loses it before its lease: the highest descriptors go first."""
    with socket.socket(socket.AF_UNIX) as one:
        high = socket.socket(fileno=fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _ABOVE))
    try:
        high.bind(f"\0{directory}/{name}")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        os.write(log, b"double\n")
    return high


def main() -> None:
    acquisitions, processes = (int(word) for word in (*sys.argv[1:], "1000", "50")[:2])
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        print(storm(Path(folder), acquisitions, processes), f"{time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
