"""Features that look at a call which takes longer than a moment: ``stall=`` does.

begin --a while later--> watch(call) of each feature's caller.py --> its watcher --ask--> the launch's agent
                                                                         +------found--> the user, or the call's end
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlaunch.core.records import Noticed
from mlaunch.protocol.messages import Question

if TYPE_CHECKING:
    from mlaunch.base.exceptions import RankFailure
    from mlaunch.core.parts import Watcher
    from mlaunch.protocol.spec import LaunchSpec

    TakeRanks = Callable[[Sequence[Mapping[str, Any]]], None]  # each as its agent describes it
    TakeNoticed = Callable[[Noticed, RankFailure | None], None]

# Seconds until they begin to look: if options ask for something, and otherwise. Shorter calls are spared the work.
_SOON, _LATE = 0.2, 10.0
_NEVER = float("inf")


class WatchedCall:
    """A call, as the features that look at it see it.

    Attributes:
        spec: Its launch.
        begun: When it began, in monotonic seconds.
        clock: Returns the time in monotonic seconds.
    """

    clock = staticmethod(time.monotonic)

    def __init__(
        self, spec: LaunchSpec, begun: float, ask: Callable[[bytes, TakeRanks], None], found: TakeNoticed
    ) -> None:
        self.spec, self.begun = spec, begun
        self._ask, self._found = ask, found

    def ask(self, word: bytes, take: TakeRanks) -> None:
        """Ask its agent as a visitor does (``protocol/visitors.py``); ``take`` gets what the agent tells of ranks."""
        self._ask(word, take)

    def found(self, noticed: Noticed, failure: RankFailure | None = None) -> None:
        """Tell the user what was found. With ``failure``, end the call by that instead, unless it has failed."""
        self._found(noticed, failure)


class Watchers:
    """The watchers of one launch. ``send`` sends to its agent, ``found`` takes what they find."""

    def __init__(self, spec: LaunchSpec, send: Callable[[Question], object], found: TakeNoticed) -> None:
        self._spec, self._send, self._found = spec, send, found
        self._watchers: list[Watcher] = []
        self._begun = self._due = _NEVER  # when the call began; when watchers are made
        self._asked: dict[int, TakeRanks] = {}  # by the number of the question
        self._number = 0
        self.held = False  # a user is debugging

    def begin(self, now: float) -> None:
        """Begin with a call."""
        self._watchers, self._asked = [], {}
        self._begun, self._due = now, now + (_SOON if self._spec.sections else _LATE)

    def rest(self) -> None:
        """End with the call."""
        self._watchers, self._asked = [], {}
        self._begun = self._due = _NEVER

    def hold(self, *, held: bool) -> None:
        """Stop looking while a user is debugging, or begin again."""
        self.held = held
        if self._begun < _NEVER:
            self.begin(time.monotonic())

    def timeout(self) -> float | None:
        """Return the seconds until ``take_steps`` has something to do; None if it has nothing."""
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
            from mlaunch.core.load import watchers_of  # short calls do not need it

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
        """Pass on the answer to a question, unless it is about an earlier call."""
        if (take := self._asked.pop(number, None)) is not None:
            take(status["ranks"])
