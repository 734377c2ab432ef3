"""Features that look at a call which takes longer than a moment: ``stall=`` does.

begin --a while later--> watch(call) of each feature's caller.py --> its watcher --ask--> the launch's agent
                                                                         +------found--> the user, or the call's end
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlaunch.core.notes import Noticed
from mlaunch.protocol.messages import Question

if TYPE_CHECKING:
    from mlaunch.base.exceptions import RankFailure
    from mlaunch.core.parts import Watcher
    from mlaunch.protocol.spec import LaunchSpec

    TakeRanks = Callable[[Sequence[Mapping[str, Any]]], None]  # each as its agent tells of it
    TakeNoticed = Callable[[Noticed, RankFailure | None], None]

# Seconds after which they begin to look: where options ask for something, and else. Shorter calls are spared the work.
_SOON, _LATE = 0.2, 10.0
_NEVER = float("inf")


class WatchedCall:
    """A call as a feature sees it that looks at it.

    Attributes:
        spec: Its launch.
        begun: When it began, in monotonic seconds.
        clock: Returns them.
    """

    clock = staticmethod(time.monotonic)

    def __init__(
        self, spec: LaunchSpec, begun: float, ask: Callable[[bytes, TakeRanks], None], found: TakeNoticed
    ) -> None:
        self.spec, self.begun = spec, begun
        self._ask, self._found = ask, found

    def ask(self, word: bytes, take: TakeRanks) -> None:
        """Ask its agent as who comes to look does (``protocol/visitors.py``); ``take`` gets what it tells of ranks."""
        self._ask(word, take)

    def found(self, noticed: Noticed, failure: RankFailure | None = None) -> None:
        """Tell the user what was found; with ``failure`` end the call by that instead, unless it has failed already."""
        self._found(noticed, failure)


class Watchers:
    """Those of one launch. ``send`` reaches its agent, ``found`` gets what they find."""

    def __init__(self, spec: LaunchSpec, send: Callable[[Question], object], found: TakeNoticed) -> None:
        self._spec, self._send, self._found = spec, send, found
        self._watchers: list[Watcher] = []
        self._begun = self._due = _NEVER  # the call; when watchers are made
        self._asked: dict[int, TakeRanks] = {}  # by the number of the question
        self._number = 0
        self.held = False  # somebody debugs

    def begin(self, now: float) -> None:
        """Begin with a call."""
        self._watchers, self._asked = [], {}
        self._begun, self._due = now, now + (_SOON if self._spec.sections else _LATE)

    def rest(self) -> None:
        """End with the call."""
        self._watchers, self._asked = [], {}
        self._begun = self._due = _NEVER

    def hold(self, *, held: bool) -> None:
        """Cease to look while somebody debugs, or begin again."""
        self.held = held
        if self._begun < _NEVER:
            self.begin(time.monotonic())

    def timeout(self) -> float | None:
        """Return the seconds until ``take_steps`` has something to do; None: it has not."""
        due = self._due
        for watcher in self._watchers:
            due = min(due, watcher.due)
        return None if self.held or due == _NEVER else max(0.0, due - time.monotonic())

    def take_steps(self) -> None:
        """Take the steps that are due."""
        if self.held or self._begun == _NEVER:
            return
        now = time.monotonic()
        if now >= self._due:
            from mlaunch.core.load import watchers_of  # which short calls do not need

            self._due = _NEVER
            self._watchers = watchers_of(WatchedCall(self._spec, self._begun, self._ask, self._found))
        for watcher in self._watchers:
            if now >= watcher.due:
                watcher.take_steps()

    def _ask(self, word: bytes, take: TakeRanks) -> None:
        self._number += 1
        self._asked[self._number] = take
        self._send(Question(self._number, word))

    def take(self, number: int, status: Mapping[str, Any]) -> None:
        """Pass on the answer to a question, unless it is of an earlier call."""
        if (take := self._asked.pop(number, None)) is not None:
            take(status["ranks"])
