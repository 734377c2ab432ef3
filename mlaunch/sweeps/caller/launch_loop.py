"""The thread that drives all submitted launches. It runs while there are any, and waits for all of them at once."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from mlaunch.base import linux
from mlaunch.base.fds import in_forks, leave_to_parent
from mlaunch.base.log import log
from mlaunch.caller.launch.settle import Ended, Steps
from mlaunch.core.records import Need

THREAD = "mlaunch-runs"
Tell = Callable[[Ended | BaseException], None]


class _Driver(threading.Thread):
    """A thread that drives, or did so until one of its callbacks waited."""

    def __init__(self, drive: Callable[[], None]) -> None:
        super().__init__(target=drive, name=THREAD, daemon=True)


class LaunchLoop:
    """A thread that drives each call that was added to its end, and calls back.

    Before a callback waits for a run, the thread hands over: another one drives from then on, and the first ends with
    its callback.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._new: list[tuple[Steps, Tell]] = []
        self._wake = -1  # an eventfd, while there is a thread that drives
        self._driver: threading.Thread | None = None
        self._ended: deque[tuple[Tell, Ended | BaseException]] = deque()  # before they are called back
        self._calls: dict[Steps, tuple[Need, float | None, Tell]] = {}  # what each needs, and until when

    def add(self, steps: Steps, tell: Tell) -> None:
        with self._lock:
            self._new.append((steps, tell))
            if self._driver is None:
                self._start()
        self.notify()

    def notify(self) -> None:
        """Wake the loop: it takes a step of all calls."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def forget(self) -> None:
        """Forget all in a fork of this process, which does not have the thread."""
        leave_to_parent([self._calls, self._new, self._ended])  # the parent has the launches
        if self._wake >= 0:
            os.close(self._wake)
        self.__init__()  # type: ignore[misc]  # the lock may be held for ever

    def is_here(self) -> bool:
        """True in a callback."""
        return isinstance(threading.current_thread(), _Driver)

    def hand_over(self) -> None:
        """Let another thread drive if this one does and is about to wait in a callback."""
        if not self.is_here():
            return
        with self._lock:
            if self._driver in {None, threading.current_thread()}:
                self._start()
                self.notify()  # for what this one had not come to

    def _start(self) -> None:
        """Start a thread that drives from now on; called under the lock."""
        if self._wake < 0:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._driver = _Driver(self._follow)
        self._driver.start()

    def _drives(self) -> bool:
        return self._driver is threading.current_thread()

    def _follow(self) -> None:
        while self._has_some():
            self._round()
        if self._driver is None:
            self._tell()  # last, so that this thread is about to end when its waiters wake

    def _round(self) -> None:
        """Take a step of each call that has something to do; wait until one has."""
        self._tell()
        if not self._drives():
            return
        # Runs that have ended are called back first: a failure cancels the trials in line, which then take no devices.
        for steps in sorted(self._due(self._wait()), key=lambda steps: bool(self._calls[steps][0].text)):
            if self._calls[steps][0].text:
                self._tell()
            if not self._drives():  # a callback waits, and another thread has all that is left
                return
            self._step(steps, self._calls[steps][2])

    def _tell(self) -> None:
        while self._ended and self._driver in {None, threading.current_thread()}:
            try:
                tell, how = self._ended.popleft()
            except IndexError:  # the thread that drives next calls back, too
                return
            try:
                tell(how)
            except BaseException:  # whatever a callback may raise: the others continue
                log.exception("a callback of a submitted launch raised")

    def _has_some(self) -> bool:
        """Begin what was added; False if this thread has nothing left to do, or another one does it."""
        while self._drives() and not self._begin_new():
            with self._lock:
                if not self._new and self._drives():
                    os.close(self._wake)
                    self._wake, self._driver = -1, None
        return self._drives()

    def _begin_new(self) -> bool:
        """Begin what was added; False if there is nothing to drive."""
        while True:
            with self._lock:
                new, self._new = self._new, []
            if not new:
                return bool(self._calls)
            for steps, tell in new:
                self._step(steps, tell)

    def _step(self, steps: Steps, tell: Tell) -> None:
        """Take a step of a call."""
        self._calls.pop(steps, None)
        try:
            need = next(steps)
        except StopIteration as end:
            self._end(tell, end.value)
        except BaseException as error:  # also of user code that pickles: the others continue
            self._end(tell, error)
        else:
            due = None if need.timeout is None else time.monotonic() + need.timeout
            if self._drives():
                self._calls[steps] = need, due, tell
            else:  # a callback has waited; the thread that drives now takes the next step at once
                self.add(steps, tell)

    def _end(self, tell: Tell, how: Ended | BaseException) -> None:
        self._ended.append((tell, how))
        if not self._drives():
            with self._lock:
                if self._driver is None:
                    self._start()
            self.notify()

    def _wait(self) -> set[int]:
        fds = [self._wake, *(fd for need, _, _ in self._calls.values() for fd in need.fds)]
        due = min((at for _, at, _ in self._calls.values() if at is not None), default=None)
        return set(linux.wait_readable(fds, None if due is None else due - time.monotonic()))

    def _due(self, ready: set[int]) -> list[Steps]:
        """Return the calls that have something to do: all of them after ``notify``."""
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            return list(self._calls)
        now = time.monotonic()
        return [
            steps
            for steps, (need, at, _) in self._calls.items()
            if not ready.isdisjoint(need.fds) or (at is not None and at <= now)
        ]


loop = LaunchLoop()
in_forks(loop.forget)
