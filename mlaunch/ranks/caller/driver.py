"""The driver of a launch of ranks that stay: one thread at a time.

A thread that waits for a call drives it itself: Ctrl-C, the running cell and the latency are then those of a launch.
While no thread waits, the driver's own thread drives: it passes on what ranks print, advances submitted calls, and
notices when a rank dies.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from mlaunch.base import linux
from mlaunch.base.fds import KeptEpoll, KeptFd, in_forks
from mlaunch.caller import interrupts
from mlaunch.ranks.caller.kept_call import KeptCall

_LOOK_AGAIN = 1.0  # seconds after which the driving thread checks again whether its call is over
_SHORT_STEP = 0.01  # seconds that a step takes at most, unless it waits for a reader of what ranks print


class Driver:
    """The loop that steps a launch when there is something to do, in a thread that waits for a call or in its own."""

    def __init__(self, launch: Any) -> None:  # a RanksLaunch, whose module imports this one
        self._launch = launch
        self._pid = os.getpid()
        self._leader: int | None = None  # a thread
        self._closing = threading.RLock()  # so that no thread writes into a file with a closed descriptor's number
        self._wake = KeptFd(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self._wakes = launch.watch(self._wake.fd)
        # The thread wakes when the other end closes, even if other code closes it: a poll holds what it waits for,
        # unlike an epoll.
        self._ending, self._end = (KeptFd(fd) for fd in os.pipe2(os.O_CLOEXEC))
        self._kept = KeptEpoll()
        self._watched = self._kept.poll  # by the thread; the launch only while no other thread drives
        self._fd = launch.fileno()
        self._watched.register(self._fd, select.EPOLLIN)
        self._watched.register(self._ending.fd, 0)  # to check later that it is still the same file
        _drivers.add(self)
        self._thread = threading.Thread(target=self._follow, name="mlaunch-ranks", daemon=True)
        self._thread.start()

    def intact(self) -> bool:
        """True if the descriptors are still its own: other code may have closed them and opened files."""
        # Checked for each call. If the kernel finds both, by number and open file, they are still the same.
        if self._kept.watches(self._ending.fd, 0):
            return self._is_woken() and self._end.intact()
        if self._ending.intact():
            self._kept.forget()
        return self._is_woken() and all(one.intact() for one in (self._ending, self._end, self._kept))

    def _is_woken(self) -> bool:
        if not self._wakes():
            self._wake.forget()
        return self._wake.intact()

    def drive(self, call: KeptCall) -> None:
        """Step until the call is over, or all has ended, if no other thread does; otherwise wait. Can be interrupted.

        If all has ended and the call is not over, it belongs to another driver, or soon will.
        """
        if not self._leads(lambda: call.over, call):
            interrupts.wait(call.wait)

    def drive_in_callback(self, over: Callable[[], bool], due: float | None) -> None:
        """Step until ``over`` is True or ``due`` has come, if this is the driver's own thread, in a future's callback.

        No other thread would step then. ``due``: in monotonic seconds.
        """
        if threading.current_thread() is self._thread:
            self._leads(lambda: over() or (due is not None and time.monotonic() >= due), due=due)

    def _leads(self, over: Callable[[], bool], call: KeptCall | None = None, due: float | None = None) -> bool:
        """Step until ``over`` is True, or all has ended; return False if another thread does."""
        me, before = threading.get_ident(), self._leader
        if not self._takes_lead(me):
            return False
        try:
            if call is not None:
                self._launch.hear_values(call)
                self._tell()
            while not over() and not self._launch.ended.is_set():
                if not self._takes_lead(me):  # another thread drives since this one ran callbacks
                    return False
                if over():  # it became True meanwhile: callbacks that run while no thread drives wake nobody
                    break
                # The waiting thread drives: output lands in the running cell, Ctrl-C comes where it is handled, and no
                # thread has to be woken.
                interrupts.wait_readable([self._fd], self._patience(due))
                self._read_wake()
                self._launch.step()
                self._tell()
        finally:
            with self._launch.lock:
                if self._leader in {None, me}:
                    self._lead(before if before == me else None)
                if before == me or not self._launch.idle:  # it may wait for what others have taken in meanwhile
                    self.notify()
        return True

    def _tell(self) -> None:
        """Set the futures that a step has settled. Wake a thread that drives now: it may wait for one of them."""
        self._launch.tell()
        with self._launch.lock:
            if self._leader not in {None, threading.get_ident()}:
                self.notify()

    def _patience(self, due: float | None) -> float:
        """Return how long to wait.

        Bounded, because another thread's callbacks may have ended the wait without a wake-up.
        """
        left = None if due is None else max(0.0, due - time.monotonic())
        return min(one for one in (self._launch.timeout(), left, _LOOK_AGAIN) if one is not None)

    def _takes_lead(self, me: int) -> bool:
        """Make this thread the driver; return False if another one is, or all has ended."""
        lock = self._launch.lock
        while not lock.acquire(timeout=_LOOK_AGAIN):  # its holder may wait for a reader of what ranks print
            with interrupts.allowed():
                pass
        try:
            if self._leader not in {None, me} or self._launch.ended.is_set():
                return False
            if self._leader is None:
                self._lead(me)
            return True
        finally:
            lock.release()

    def now_or_next(self, do: Callable[[], None]) -> None:
        """Call ``do`` under the lock; leave it to the next step, which does the same, if the present one takes long."""
        if self._launch.lock.acquire(timeout=_SHORT_STEP):
            try:
                do()
            finally:
                self._launch.lock.release()
        else:
            self.notify()

    def step_aside(self) -> None:
        """Make room for another driver, if this thread drives, while it runs user code, which may wait for one."""
        with self._launch.lock:
            if self._leader == threading.get_ident():
                self._lead(None)
                if not self._launch.idle:
                    self.notify()

    def _lead(self, thread: int | None) -> None:
        """Make ``thread`` the driver; None: the driver's own thread. Called under the lock."""
        changed, self._leader = thread != self._leader, thread
        if changed and not self._launch.ended.is_set():  # otherwise the own thread has ended, or is about to
            try:
                self._watched.modify(self._fd, select.EPOLLIN if thread is None else 0)
            except OSError:  # they were closed, which a step will find
                return

    def drive_to_end(self) -> None:
        """Drive until all has ended, or wait for that. Can be interrupted."""
        while not self._launch.ended.is_set():
            if threading.current_thread() is self._thread:  # in a callback of a future
                self._follow_once()
            elif not self._leads(self._launch.ended.is_set):
                self._wait_for_end()

    def join(self) -> None:
        """Wait, after the end, until all futures are set, unless called in a callback. Can be interrupted."""
        if threading.current_thread() is not self._thread:
            interrupts.wait(self._has_ended)

    def _has_ended(self, timeout: float) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _wait_for_end(self) -> None:
        with self._closing:
            if not self._ending.intact():
                return
            end = os.dup(self._ending.fd)
        try:
            interrupts.wait_readable([end])
        finally:
            os.close(end)

    def notify(self) -> None:
        """Make the driving thread check again.

        The collector may call it anywhere, so it takes no lock that is held long.
        """
        if self._pid != os.getpid():  # a fork shares the descriptor, and a thread may have held the lock
            return
        with self._closing:
            if self._is_woken():
                os.eventfd_write(self._wake.fd, 1)

    def end(self) -> None:
        """Make the thread check whether the launch has ended."""
        if self._pid == os.getpid():
            with self._closing:
                self._end.close()

    def _leave_to_parent(self) -> None:
        """Close a fork's copy of the end whose closing wakes the parent's thread."""
        self._end.close()

    def _read_wake(self) -> None:
        with self._closing, contextlib.suppress(BlockingIOError):
            if self._is_woken():
                os.eventfd_read(self._wake.fd)

    def _follow(self) -> None:
        """Drive while no other thread does; the main function of the driver's thread."""
        while not self._launch.ended.is_set():
            self._follow_once()
        with self._closing:
            for one in (self._kept, self._wake, self._ending, self._end):
                one.close()

    def _follow_once(self) -> None:
        linux.wait_readable([self._kept.fd, self._ending.fd], self._timeout())
        with self._launch.lock:  # for all of the step: a thread that begins to drive would wait on closed files
            drives = (self._leader is None or not self.intact()) and not self._launch.ended.is_set()
            if drives:
                self._read_wake()
                self._launch.step()
        if drives:
            self._tell()

    def _timeout(self) -> float | None:
        """Return the seconds until the thread must check again.

        It is not woken when another thread stops driving, and may begin to wait after a call was submitted and before
        its caller drives it. So it never waits for longer than ranks may idle.
        """
        with self._launch.lock:
            if self._launch.ended.is_set():
                return 0.0
            due = self._launch.timeout() if self._leader is None else None
            return min((one for one in (due, self._launch.rules.idle_timeout) if one is not None), default=None)


def _leave_all_to_parent() -> None:
    for driver in list(_drivers):
        driver._leave_to_parent()


_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()
in_forks(_leave_all_to_parent)
