"""The thread that drives all submitted launches. It is there while there are any, and waits on all of them at once."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
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

    def _follow(self) -> None:
        ended: list[tuple[Tell, Ended | BaseException]] = []
        while self._take_new(ended):
            _tell(ended)
            ended = []
            # Runs that have ended are told first: one that failed cancels the trials in line, which then take no
            # devices.
            for steps in sorted(self._due(self._wait()), key=lambda steps: self._courses[steps][0].later):
                if self._courses[steps][0].later:
                    _tell(ended)
                    ended = []
                ended += self._step(steps, self._courses[steps][2])
        _tell(ended)  # last, so that who waits for it finds this thread at its end

    def _take_new(self, ended: list[tuple[Tell, Ended | BaseException]]) -> bool:
        """Begins what was added; False, and the thread has nothing left, if there is nothing to drive."""
        while True:
            with self._lock:
                new, self._new = self._new, []
                if not new and not self._courses:
                    os.close(self._wake)
                    self._wake = -1
                    return False
            if not new:
                return True
            for steps, tell in new:
                ended += self._step(steps, tell)

    def _step(self, steps: Steps, tell: Tell) -> list[tuple[Tell, Ended | BaseException]]:
        """Takes a step of a course; returns how it ended, if it did."""
        self._courses.pop(steps, None)
        try:
            need = next(steps)
        except StopIteration as end:
            return [(tell, end.value)]
        except BaseException as error:  # of user code that pickles, too: the others go on
            return [(tell, error)]
        due = None if need.timeout is None else time.monotonic() + need.timeout
        self._courses[steps] = need, due, tell
        return []

    def _wait(self) -> set[int]:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for need, _, _ in self._courses.values():
            for fd in need.fds:
                poll.register(fd, select.POLLIN)
        due = min((at for _, at, _ in self._courses.values() if at is not None), default=None)
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


def _tell(ended: list[tuple[Tell, Ended | BaseException]]) -> None:
    for tell, how in ended:
        try:
            tell(how)
        except BaseException:  # sys.exit in a callback: the others are driven on
            log.exception("a callback of a submitted launch raised")


loop = LaunchLoop()
os.register_at_fork(after_in_child=loop.forget)
