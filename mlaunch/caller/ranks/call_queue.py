"""The calls on ranks that stay that have not begun, and those that are over and of which nobody has been told."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable

from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.ranks.kept_call import KeptCall
from mlaunch.caller.ranks.session_words import lost
from mlaunch.caller.report.launch_report import LaunchReport


class Queue:
    """Under the lock of whoever has it, save ``tell``, which runs user code, and ``add``."""

    def __init__(self) -> None:
        # Not the session's lock: a step may hold that for as long as nobody reads what ranks print.
        self._entry = threading.Lock()  # held by nobody who waits
        self._numbers = itertools.count(1)
        self._are_lost = False  # the ranks
        self._waiting: deque[KeptCall] = deque()
        self._left: deque[KeptCall] = deque()  # that other ranks may run, since these are lost
        self._settled: deque[KeptCall] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def last(self) -> KeptCall | None:
        """The one that will begin last."""
        return self._waiting[-1] if self._waiting else None

    def add(self, call: KeptCall) -> bool:
        """Takes one in, and gives it its number; False if the ranks are lost."""
        with self._entry:
            if not self._are_lost:
                call.number = next(self._numbers)
                self._waiting.append(call)
            return not self._are_lost

    def begin_next(self) -> KeptCall | None:
        """Returns the next one, which begins; None if there is none, now that cancelled ones are left out."""
        while self._waiting:
            call = self._waiting.popleft()
            if call.begin():
                return call
            call.cancel()
        return None

    def remove(self, call: KeptCall) -> bool:
        """Takes one out that has not begun; False if it has."""
        with self._entry:
            found = next((calls for calls in (self._waiting, self._left) if call in calls), None)
            if found is not None:
                found.remove(call)
            return found is not None

    def clear(self) -> deque[KeptCall]:
        """Takes out those that wait."""
        with self._entry:
            waiting, self._waiting = self._waiting, deque()
            return waiting

    # The ranks are lost

    def lose(self, report: Callable[[], LaunchReport], why: str, *, others_follow: bool) -> None:
        """Leaves to others what these ranks will not run, and settles what was meant for these alone."""
        with self._entry:
            self._are_lost = True
        for call in self.clear():
            # One that holds a handle of these ranks would find nothing on others.
            if others_follow and call.moves:
                self._left.append(call)
            elif call.begin():
                self.settle(call, functools.partial(Ended, report, [], lost(call.spec.call.name, why)))
            else:
                call.cancel()

    @property
    def left(self) -> bool:
        """Whether there is something for others."""
        return bool(self._left)

    def take_left(self) -> KeptCall | None:
        """Takes out the first one that is left for others; None: there is none."""
        return self._left.popleft() if self._left else None

    # Those that are over

    def settle(self, call: KeptCall, make: Callable[[], Ended]) -> None:
        """Settles one of which nobody is told yet."""
        call.settle(make)
        self._settled.append(call)

    @property
    def settled(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._settled)

    def tell(self) -> None:
        """Tells those who wait."""
        with contextlib.suppress(IndexError):  # another thread tells, too
            while self._settled:
                self._settled.popleft().tell()
