"""Who drives a launch of ranks that stay.

Whoever waits for a call does it himself: Ctrl-C, the running cell and the latency are then those of a launch. While
nobody waits, a thread does: it carries what ranks print, advances what was submitted, and sees a rank die.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Protocol

from mlaunch.base import linux
from mlaunch.caller import interrupts

_SHORT = 0.05  # seconds


class Driven(Protocol):
    """What is driven. ``step`` takes in what has come; it takes the lock by itself."""

    lock: threading.RLock
    ended: threading.Event

    @property
    def idle(self) -> bool: ...

    def step(self) -> None: ...

    def fileno(self) -> int: ...

    def timeout(self) -> float | None: ...


class Driver:
    """Steps when there is something to do: in the thread of who waits, or in one of its own."""

    def __init__(self, driven: Driven) -> None:
        self._driven = driven
        self._free = threading.Condition(driven.lock)
        self._leader: threading.Thread | None = None
        self._parked = False  # the thread waits to be told that nobody drives
        self._waking = threading.RLock()  # so that nobody writes into what has taken a closed descriptor's number
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._follow, name="mlaunch-ranks", daemon=True)
        self._thread.start()

    def drive(self, over: threading.Event) -> None:
        """Steps until the event is set, if nobody else does; else waits for it. Can be interrupted."""
        me = threading.current_thread()
        with self._driven.lock:
            before = self._leader
            leads = before in {None, me} and not self._driven.ended.is_set()
            if leads:
                self._leader = me
        if not leads:
            with interrupts.allowed():
                over.wait()
            return
        try:
            while not over.is_set():
                interrupts.wait_readable(self._fds(), self._driven.timeout())
                self._step()
        finally:
            with self._driven.lock:
                self._leader = before
                if self._parked or not self._driven.idle:
                    self._free.notify_all()

    def drive_to_end(self) -> None:
        """Waits until what is driven has ended. Can be interrupted."""
        if threading.current_thread() is not self._thread:
            with interrupts.allowed():
                self._thread.join()
        while not self._driven.ended.is_set():  # in a callback of a future's, which that thread runs
            linux.wait_readable(self._fds(), self._driven.timeout())
            self._step()

    def notify(self) -> None:
        """Has whoever drives look again; takes no lock that is held for long: the collector may call it anywhere."""
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _fds(self) -> list[int]:
        return [self._wake, self._driven.fileno()]

    def _step(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self._driven.step()

    def _follow(self) -> None:
        """Drives while nobody else does; the thread's life."""
        while fds := self._to_watch():
            linux.wait_readable(fds, self._driven.timeout())
            with self._driven.lock:
                drives = self._leader is None
            if drives:
                self._step()
                with self._driven.lock:
                    if self._leader is not None:  # it came meanwhile, and may wait for what this step has done
                        self.notify()
        with self._waking:
            wake, self._wake = self._wake, -1
            os.close(wake)

    def _to_watch(self) -> list[int]:
        """Waits while somebody else drives; returns nothing at the end.

        Short calls come one after the other, and it would cost each of them two switches of threads to hand over. So
        the thread looks again after a moment, and has itself told only where a call takes longer.
        """
        with self._driven.lock:
            while self._leader is not None and not self._driven.ended.is_set():
                self._parked = not self._free.wait(None if self._parked else _SHORT)
            self._parked = False
            return [] if self._driven.ended.is_set() else self._fds()
