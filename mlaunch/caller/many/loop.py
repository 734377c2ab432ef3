"""The thread that drives all submitted launches. It is there while there are any, and waits on all of them at once."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from mlaunch.base.log import log
from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.many.course import Need, Steps

THREAD = "mlaunch-runs"
Tell = Callable[[Ended | BaseException], None]


class LaunchLoop:
    """Drives each course that was added to its end, and tells of that, in the thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._new: list[tuple[Steps, Tell]] = []
        self._wake = -1  # an eventfd, while there is a thread
        self._thread: int | None = None  # that drives
        self._ended: deque[tuple[Tell, Ended | BaseException]] = deque()  # and not told yet
        self._courses: dict[Steps, tuple[Need, float | None, Tell]] = {}  # what each needs, and until when

    def add(self, steps: Steps, tell: Tell) -> None:
        with self._lock:
            self._new.append((steps, tell))
            if self._wake < 0:
                self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                threading.Thread(target=self._follow, name=THREAD, daemon=True).start()
        self.notify()

    def notify(self) -> None:
        """Makes the loop look again at all that wait."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def forget(self) -> None:
        """Forgets all in a fork of this process, which has no such thread."""
        if self._wake >= 0:
            os.close(self._wake)
        self.__init__()  # type: ignore[misc]  # the lock may be held for ever

    def drive_in_callback(self, over: Callable[[], bool], due: float | None) -> None:
        """Drives until that is so, or the time has come, if it is a callback that asks, whose thread alone would do it.

        ``due``: in monotonic seconds. RuntimeError: it waits for the run that calls it back, which would never end.
        """
        while self._thread == threading.get_ident() and not over():
            if due is not None and time.monotonic() >= due:
                return
            if not self._begin_new() and not self._ended:
                raise RuntimeError("a callback waits for the run that has called it, which goes on only after that")
            self._round(due)

    def _follow(self) -> None:
        self._thread = threading.get_ident()
        while self._has_some():
            self._round(None)
        self._tell()  # last, so that who waits for it finds this thread at its end

    def _round(self, due: float | None) -> None:
        """Takes a step of each course that has something to do, or waits for that."""
        self._tell()
        # Runs that have ended are told first: one that failed cancels the trials in line, which then take no devices.
        for steps in sorted(self._due(self._wait(due)), key=lambda steps: self._courses[steps][0].later):
            if steps in self._courses and self._courses[steps][0].later:
                self._tell()
            if steps in self._courses:  # a callback may wait, and drives others meanwhile
                self._step(steps, self._courses[steps][2])

    def _tell(self) -> None:
        while self._ended:
            try:
                tell, how = self._ended.popleft()
            except IndexError:  # a thread that follows this one tells, too
                return
            try:
                tell(how)
            except BaseException:  # sys.exit in a callback: the others are driven on
                log.exception("a callback of a submitted launch raised")

    def _has_some(self) -> bool:
        """Begins what was added; False, and the thread has nothing left, if there is nothing to drive."""
        while not self._begin_new():
            with self._lock:
                if not self._new:
                    os.close(self._wake)
                    self._wake, self._thread = -1, None
                    return False
        return True

    def _begin_new(self) -> bool:
        """Begins what was added; False if there is nothing to drive."""
        while True:
            with self._lock:
                new, self._new = self._new, []
            if not new:
                return bool(self._courses)
            for steps, tell in new:
                self._step(steps, tell)

    def _step(self, steps: Steps, tell: Tell) -> None:
        """Takes a step of a course."""
        self._courses.pop(steps, None)
        try:
            need = next(steps)
        except StopIteration as end:
            self._ended.append((tell, end.value))
        except BaseException as error:  # of user code that pickles, too: the others go on
            self._ended.append((tell, error))
        else:
            due = None if need.timeout is None else time.monotonic() + need.timeout
            self._courses[steps] = need, due, tell

    def _wait(self, due: float | None) -> set[int]:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for need, _, _ in self._courses.values():
            for fd in need.fds:
                poll.register(fd, select.POLLIN)
        times = [due, *(at for _, at, _ in self._courses.values())]
        due = min((at for at in times if at is not None), default=None)
        return {fd for fd, _ in poll.poll(None if due is None else max(0.0, due - time.monotonic()) * 1000)}

    def _due(self, ready: set[int]) -> list[Steps]:
        """Returns the courses that have something to do: all, if somebody has asked for that."""
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            return list(self._courses)
        now = time.monotonic()
        return [
            steps
            for steps, (need, at, _) in self._courses.items()
            if not ready.isdisjoint(need.fds) or (at is not None and at <= now)
        ]


loop = LaunchLoop()
os.register_at_fork(after_in_child=loop.forget)
