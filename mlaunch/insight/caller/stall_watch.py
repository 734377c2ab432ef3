"""The watch of ``stall=``: while a call runs, it reports when the ranks have made no progress for long.

    watching --no progress for that long--> asking twice --no rank works--> stalled --progress--> watching
                                            (or more often, while a rank waits for something outside)
        ^                                       |
        +---------- a rank works ---------------+

It asks the launch's agent a few times in each such stretch, and never in a short call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlaunch.base.text import in_two_units
from mlaunch.caller.launch.handle import WatchedCall
from mlaunch.core.parts import Watcher
from mlaunch.core.records import Noticed
from mlaunch.insight.wire import PULSE, WHY
from mlaunch.protocol import failures

_QUESTIONS = 4  # in a stretch without progress: its end is known to a quarter, and they cost nothing
_NEVER = float("inf")

Ranks = Sequence[Mapping[str, Any]]


@dataclass
class StallWatch(Watcher):
    """The watch of one call. ``limit``: seconds."""

    call: WatchedCall
    limit: float
    ends: bool  # True: end a stalled call

    def __post_init__(self) -> None:
        self.due = self.call.begun + self.limit / _QUESTIONS
        self._moved_at = self.call.begun
        self._moves = False  # True: its ranks show progress at all
        self._known: Ranks = ()
        self._first: Ranks | None = None  # the first of several answers, and the last
        self._last: Ranks = ()
        self._first_at = 0.0
        self._asks_twice = False
        self._stalled = False

    def take_steps(self) -> None:
        """Ask the agent."""
        self.due = _NEVER  # until the answer is there
        self.call.ask(WHY if self._asks_twice else PULSE, self._take)

    def _take(self, ranks: Ranks) -> None:
        from mlaunch.insight.caller import stall_signs  # after a quarter of the time: few calls take so long

        now = self.call.clock()
        if not stall_signs.run(ranks) or stall_signs.moved(self._known, ranks):
            self._note_progress(now)
        self._moves = self._moves or stall_signs.counted(self._known, ranks)
        self._known = ranks
        if self._asks_twice:
            self._compare(ranks, now)
        elif not self._stalled and now >= self._moved_at + self.limit:
            self._asks_twice, self.due = True, now
            return
        if not self._asks_twice:
            left = _NEVER if self._stalled else max(0.0, self._moved_at + self.limit - now)
            self.due = now + min(self.limit / _QUESTIONS, left)

    def _note_progress(self, now: float) -> None:
        if self._stalled:
            self._tell(f"makes progress again, after {in_two_units(now - self._moved_at)}")
        self._moved_at, self._stalled, self._asks_twice, self._first = now, False, False, None

    def _tell(self, what: str) -> None:
        self.call.found(Noticed("stall", what))

    def _compare(self, ranks: Ranks, now: float) -> None:
        """Keep the first answer, or compare it with later ones."""
        from mlaunch.insight.caller import stall_signs

        if self._first is None:
            self._first, self._last, self._first_at, self.due = ranks, ranks, now, now + stall_signs.APART
            return
        # One answer says where a rank is, and not whether it moves.
        works = stall_signs.work(self._last, ranks) or stall_signs.stirred(self._first, ranks)
        works = works or not (self._moves or stall_signs.has_begun(ranks))
        patience = stall_signs.patience(ranks, self.limit)
        if not works and now < self._first_at + patience:
            self._last, self.due = ranks, now + max(stall_signs.APART, patience / 5)
            return
        self._asks_twice, self._first = False, None
        if works:
            self._moved_at = now
        else:
            self._stalled = True
            self._accuse(stall_signs.stalled(now - self._moved_at, ranks), stall_signs.places(ranks))

    def _accuse(self, what: str, places: Sequence[str]) -> None:
        if self.ends:
            self.call.found(Noticed("stall", what), failures.of_run(what, "stalled", final=False))
            return
        lines = [f"has {what}", *(f"  {place}" for place in places)]
        self._tell("\n".join([*lines, "  the run continues; stall= (--stall of mlaunch run) decides what happens"]))
