"""Looks, while a call runs, whether its ranks make progress, and tells when they have made none for long.

    watching --no progress for that long--> looking twice --nobody works--> stalled --progress--> watching
                                            (or more often, while a rank waits for something outside)
        ^                                       |
        +---------- somebody works -------------+

It asks the launch's agent a few times in each such stretch; nothing is asked of a call that is short.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from mlaunch.base.exceptions import RankFailure
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.text import in_two_units
from mlaunch.caller import stall_signs
from mlaunch.caller.stall_signs import Ranks
from mlaunch.protocol import failures
from mlaunch.protocol.messages.status_messages import TellStatus
from mlaunch.protocol.visitors import PULSE, WHY

# Often enough to know the end of a stretch to a quarter, and seldom enough to cost nothing.
_LOOKS = 4  # in a stretch without progress
_NEVER = float("inf")


@frozen_record
class Stalled:
    """The user was told that the ranks make no progress, or that they do again. ``what``: in which words."""

    what: str


@dataclass
class StallWatch:
    """``limit``: seconds; None: it does not watch. ``ask`` sends a question, ``say`` tells the user."""

    limit: float | None
    ends: bool  # what has stalled is to be ended
    ask: Callable[[TellStatus], object]
    say: Callable[[str], object]
    clock: Callable[[], float] = time.monotonic
    _due: float = _NEVER
    _number: int = 0  # of the question that is open
    _moved_at: float = 0.0
    _moves: bool = False  # its ranks have been seen to show progress
    _known: Ranks = ()
    _first: Ranks | None = None  # the first of several looks, and the last
    _last: Ranks = ()
    _first_at: float = 0.0
    _looks_twice: bool = False
    _stalled: bool = False
    held: bool = False  # somebody debugs

    def begin(self, now: float) -> None:
        """Begins to watch a call."""
        if self.limit is not None:
            self._due, self._moved_at = now + self.limit / _LOOKS, now
            self._number += 1  # what was asked of the last call is not taken any more
            self._moves = self._looks_twice = self._stalled = False
            self._known, self._first = (), None

    def rest(self) -> None:
        """Ceases to: the call is over."""
        self._due = _NEVER
        self._number += 1

    def hold(self, *, held: bool) -> None:
        """Ceases to watch while somebody debugs, or begins anew."""
        self.held = held
        if not held and self._due < _NEVER:
            self.begin(self.clock())

    def timeout(self) -> float | None:
        """Returns the seconds until ``take_step`` has something to do; None: it has not."""
        return None if self._due == _NEVER or self.held else max(0.0, self._due - self.clock())

    def take_step(self) -> None:
        """Asks, if that is due."""
        if self._due < _NEVER and self.clock() >= self._due and not self.held:
            self._due = _NEVER  # until the answer is there
            self._number += 1
            self.ask(TellStatus(self._number, WHY if self._looks_twice else PULSE))

    def take(self, number: int, ranks: Ranks) -> RankFailure | None:
        """Takes in an answer. Returns why the call is to be ended, if it is."""
        if number != self._number or self.limit is None:
            return None
        now, found = self.clock(), None
        if self.held:
            self._due = now
            return None
        if not stall_signs.run(ranks) or stall_signs.moved(self._known, ranks):
            self._note_progress(now)
        self._moves = self._moves or stall_signs.counted(self._known, ranks)
        self._known = ranks
        if self._looks_twice:
            found = self._compare(ranks, now)
        elif not self._stalled and now >= self._moved_at + self.limit:
            self._looks_twice, self._due = True, now
            return None
        if not self._looks_twice:
            left = _NEVER if self._stalled else max(0.0, self._moved_at + self.limit - now)
            self._due = now + min(self.limit / _LOOKS, left)
        return found

    def _note_progress(self, now: float) -> None:
        if self._stalled:
            self.say(f"makes progress again, after {in_two_units(now - self._moved_at)}")
        self._moved_at, self._stalled, self._looks_twice, self._first = now, False, False, None

    def _compare(self, ranks: Ranks, now: float) -> RankFailure | None:
        """Takes the first of the looks, or compares them."""
        if self._first is None:
            self._first, self._last, self._first_at, self._due = ranks, ranks, now, now + stall_signs.APART
            return None
        # Two looks, since one says where a rank is, and not whether it moves.
        works = stall_signs.work(self._last, ranks) or stall_signs.stirred(self._first, ranks)
        works = works or not (self._moves or stall_signs.has_begun(ranks))
        patience = stall_signs.patience(ranks, self.limit or 0.0)
        if not works and now < self._first_at + patience:
            self._last, self._due = ranks, now + max(stall_signs.APART, patience / 5)
            return None
        self._looks_twice, self._first = False, None
        if works:
            self._moved_at = now
            return None
        self._stalled = True
        what = stall_signs.stalled(now - self._moved_at, ranks)
        if self.ends:
            return failures.from_stall(what)
        lines = [f"has {what}", *(f"  {place}" for place in stall_signs.places(ranks))]
        self.say("\n".join([*lines, "  the run goes on; stall= (--stall of mlaunch run) says what is done about it"]))
        return None
