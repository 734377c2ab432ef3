"""Sends this process real interrupts, from another process, at given moments."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import random
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from types import FrameType

_SENDER = """
import os, signal, sys, time
caller = os.getppid()
for line in sys.stdin:
    for pause in map(float, line.split()):
        time.sleep(pause)
        os.kill(caller, signal.SIGINT)
    os.write(1, b".")
"""


class Interrupter:
    """Its handler raises KeyboardInterrupt only during a call, so that none hits the test itself."""

    def __init__(self) -> None:
        self._armed = False
        self._orders = 0
        signal.signal(signal.SIGINT, self.take)
        self._sender = subprocess.Popen(
            [sys.executable, "-c", _SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    def take(self, _number: int, _frame: FrameType | None) -> None:
        if self._armed:
            raise KeyboardInterrupt

    def interrupt(self, call: Callable[[], object], chance: random.Random, within: float) -> bool:
        """Calls, and interrupts that one to three times; says whether an interrupt came through."""
        assert self._sender.stdin is not None
        pauses = [chance.uniform(0, within) for _ in range(chance.choice([1, 1, 2, 3]))]
        order = (" ".join(f"{pause:.6f}" for pause in pauses) + "\n").encode()
        self._orders += 1
        through = self._during(call, self._sender.stdin.fileno(), order)
        self._wait_until_sent()
        return through

    def _during(self, call: Callable[[], object], fd: int, order: bytes) -> bool:
        self._armed = True
        try:
            try:
                os.write(fd, order)
                call()
            finally:
                self._armed = False
        except KeyboardInterrupt:
            self._armed = False
            return True
        return False

    def _wait_until_sent(self) -> None:
        """Until the sender has written a byte for each order; they stay in the pipe."""
        assert self._sender.stdout is not None
        count = array.array("i", [0])
        while count[0] < self._orders:
            fcntl.ioctl(self._sender.stdout.fileno(), termios.FIONREAD, count)
            assert self._sender.poll() is None
            select.select([], [], [], 0.001)

    def close(self) -> None:
        with self._sender:
            pass


def open_files() -> list[str]:
    """What this process has open, by number."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.append(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return sorted(found)
