"""The messages about a stop, and how members (ranks or machines) agree on its step.

    none --ask--> freezing --all have told their counts--> agreed: the highest count, plus one
                     |  ^
                one does not answer: all continue, and are asked again

A member that cannot answer (C code holds its interpreter lock, or a debugger has stopped it) delays the others only for
one round of freezing at a time; after half of the whole time they agree without it.

The messages (one to an agent is about one call, which the record around it names):

caller -> agent    AskToStop
caller -> agent    FreezeRanks, ThawRanks, StopRanks      (from an engine's caller, which runs the agreement)
agent -> caller    RanksFrozen                            (to such a caller)
agent -> caller    StopAgreed, StopOverdue
agent -> rank      FreezeChecks, CountChecks                 (questions, answered with a count)
agent -> rank      ThawChecks, StopAtCheck
agent -> gate      AskAll, RanksFrozen                    (machines with a caller each: the gate runs the agreement)
gate -> agent      FreezeRanks, ThawRanks, StopRanks, NobodyChecks
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol, TypeGuard, cast

from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.registry import ASK

NAME = "agreed_stop"  # of this feature
STOP = ASK + NAME.encode()  # which ``mlaunch stop`` sends to a launch


@frozen_record
class StopTerms:
    """A launch's options about a stop: the feature's section of its spec.

    Attributes:
        grace: Seconds in which ranks must stop when they are asked to.
        signals: The caller's signals that ask for it (``stop_on=``).
    """

    grace: float = 300.0
    signals: tuple[int, ...] = ()

    @property
    def expected(self) -> bool:
        """True if the options say that the ranks call ``mlaunch.stopping``."""
        return bool(self.signals)


def terms_of(sections: Mapping[str, object]) -> StopTerms:
    """Return the terms in a launch's sections; the default terms if there are none."""
    return cast(StopTerms, sections.get(NAME)) or StopTerms()


@frozen_record
class AskToStop:
    """A request to the ranks to stop at a step that they agree on. ``reason``: what ``stopping()`` returns."""

    reason: str


@frozen_record
class AskAll:
    """A request to the ranks of all machines to stop.

    Attributes:
        patience: Seconds after which machines that cannot answer are left out.
        unsure: True if it is not known whether ranks call ``stopping()``. If none has, the answer is ``NobodyChecks``.
    """

    reason: str
    patience: float
    unsure: bool


@frozen_record
class NobodyChecks:
    """The answer that no rank of any machine has called ``stopping()``."""


@frozen_record
class FreezeRanks:
    """An order to make the ranks' next checks wait, and to report the counts. ``reason``: why they must stop."""

    reason: str


@frozen_record
class RanksFrozen:
    """News that all working ranks of a machine wait at their next check. ``checks``: the largest count of a rank."""

    call: int
    checks: int


@frozen_record
class ThawRanks:
    """An order to the ranks to continue: a machine has not answered, and will be asked again."""


@frozen_record
class StopRanks:
    """An order to stop: the check at which the ranks of all machines stop."""

    check: int
    reason: str


@frozen_record
class StopAgreed:
    """News that the ranks stop at a check, by number. ``asked``: when that was asked for, in seconds of the epoch."""

    reason: str
    asked: float
    check: int


@frozen_record
class StopOverdue:
    """A notice that half of the time is over and ranks still work, and why, in words. ``left``: seconds left."""

    why: str
    seconds: float
    left: float


@frozen_record
class FreezeChecks:
    """An order to make the rank's next check in this call (``mlaunch.stopping``) wait, and to report the count."""

    call: int


@frozen_record
class CountChecks:
    """A question how many checks there were in this call."""

    call: int


@frozen_record
class ThawChecks:
    """An order to a check that waits to return: there is no decision."""

    call: int


@frozen_record
class StopAtCheck:
    """The decision: the check of this call at which all ranks stop."""

    call: int
    check: int
    reason: str


StopOrder = FreezeRanks | ThawRanks | StopRanks | NobodyChecks  # of the gate

ANSWER_TIMEOUT = 1.0  # seconds for all members to report their counts; members that have done so wait as long
PAUSE = 1.0  # seconds for which members continue before they are asked again
_MOST_CHECKS = 1 << 53


def is_check_count(said: object) -> TypeGuard[int]:
    """True if a value from another machine can be a number of checks."""
    return type(said) is int and 0 <= said <= _MOST_CHECKS  # not isinstance(), which accepts JSON's true


class Members(Protocol):
    """The members that have to agree, by number."""

    def working(self) -> Collection[int]:
        """Return the members that have not ended."""

    def freeze(self, member: int) -> None:
        """Make the member's checks wait, and ask for its count."""

    def thaw(self, member: int) -> None:
        """Let the member continue."""

    def stop_at(self, member: int, check: int) -> None:
        """Send the member the check at which it stops; it continues until then."""


class Freeze:
    """The members that are asked to wait. ``check``: the check at which they stop, once it is known."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._asked: set[int] = set()  # members that have not answered
        self._open = False
        self.counts: dict[int, int] = {}  # by members that wait
        self.check: int | None = None

    @property
    def all_wait(self) -> bool:
        """True if all working members wait; also if none works any more."""
        return self._open and all(member in self.counts for member in self._members.working())

    @property
    def complete(self) -> bool:
        """True if all working members wait, and at least one does."""
        return bool(self.counts) and self.all_wait

    def begin(self) -> None:
        """Freeze all members. A member that has not answered yet is not asked twice."""
        self._open = True
        for member in self._members.working():
            if member not in self._asked:
                self._asked.add(member)
                self._members.freeze(member)

    def take(self, member: int, checks: int) -> None:
        """Note a member's count. A member that answers too late receives the others' result at once."""
        self._asked.discard(member)
        if self.check is not None:
            self._members.stop_at(member, self.check)
        elif self._open:
            self.counts[member] = checks
        else:
            self._members.thaw(member)

    def thaw(self) -> None:
        """Let all members that wait continue."""
        frozen, self.counts, self._open = list(self.counts), {}, False
        for member in frozen:
            self._members.thaw(member)

    def stop_at(self, check: int) -> None:
        """Send all members the check at which they stop."""
        self.check = check
        for member in self._members.working():
            self._members.stop_at(member, check)


class AgreedStop:
    """The agreement of members: of ranks in their agent, or of machines in an engine's caller or the gate.

    Attributes:
        asked_by: The process that must learn if no rank calls ``stopping()``; None: the options say that ranks do.
        unused: True if no rank does. The members then continue, and do not stop.
    """

    def __init__(self, members: Members, clock: Callable[[], float], asked_by: int | None = None) -> None:
        self._clock = clock
        self.freeze = Freeze(members)
        self.asked_by = asked_by
        self.unused = False
        self._is_used = asked_by is None
        self._round_ends = self._next_at = self._without_at = float("inf")

    @property
    def check(self) -> int | None:
        """The check at which all stop; None if it is not agreed yet."""
        return self.freeze.check

    @property
    def due(self) -> float:
        """The time of the next step, on the clock; infinity: never."""
        return min(self._round_ends, self._next_at)

    def begin(self, patience: float) -> None:
        """Begin the agreement. ``patience``: seconds after which members that cannot answer are left out."""
        self._without_at = self._clock() + patience
        self._begin_round()

    def _begin_round(self) -> None:
        self._next_at, self._round_ends = float("inf"), self._clock() + ANSWER_TIMEOUT
        self.freeze.begin()

    def take_steps(self) -> bool:
        """Take the steps that are due. Return True once, when all have agreed or no rank checks (``unused``)."""
        now, counts = self._clock(), self.freeze.counts
        if self.due == float("inf"):
            return False
        if not self._is_used and (self.freeze.complete or now >= self.due):
            self._is_used = any(counts.values())
            self.unused = not self._is_used
        if self.unused:
            self.freeze.thaw()
        elif self.freeze.complete or (now >= self._round_ends and now >= self._without_at and counts):
            # Plus one: the rank with the highest count may be past that check.
            self.freeze.stop_at(max(counts.values()) + 1)
        else:
            self._go_on(now)
            return False
        self._round_ends = self._next_at = float("inf")
        return True

    def _go_on(self, now: float) -> None:
        """End a round in which not all members have answered, and begin the next one after a pause."""
        if now >= self._round_ends:
            # Members that wait work during the pause, so a rank that cannot answer costs the others half of their time
            # at most.
            self.freeze.thaw()
            self._round_ends, self._next_at = float("inf"), now + PAUSE
        if now >= self._next_at:
            self._begin_round()
