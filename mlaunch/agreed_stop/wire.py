"""What the processes of a launch say of a stop, and how members, ranks or machines, agree on its step.

    none --ask--> freezing --all have told their counts--> agreed: the highest count, plus one
                     |  ^
                one does not tell: all go on, and are asked again

A member that cannot answer (C code holds its interpreter lock, a debugger holds it) does not hold up the others for
longer than they are frozen at a time; from half of the whole time on they agree without it.

Who says what (a word to an agent is about one call, which the record around it names):

caller -> agent    AskToStop
caller -> agent    FreezeRanks, ThawRanks, StopRanks      (an engine's caller, who agrees with all machines)
agent -> caller    RanksFrozen                            (to such a caller)
agent -> caller    StopAgreed, StopOverdue
agent -> rank      FreezeLooks, TellLooks                 (questions, answered with a count)
agent -> rank      ThawLooks, StopAtLook
agent -> gate      AskAll, RanksFrozen                    (of machines with a caller each: the gate agrees with them)
gate -> agent      FreezeRanks, ThawRanks, StopRanks, NobodyLooks
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol, TypeGuard, cast

from mlaunch.base.frozen_record import frozen_record

NAME = "agreed_stop"  # of this feature


@frozen_record
class StopTerms:
    """What a launch's options say of a stop: the feature's section of its spec.

    Attributes:
        grace: Seconds in which ranks stop when they are asked to.
        signals: Those that ask for it, of the caller (``stop_on=``).
    """

    grace: float = 300.0
    signals: tuple[int, ...] = ()

    @property
    def expected(self) -> bool:
        """True if the options say that the ranks call ``mlaunch.stopping``."""
        return bool(self.signals)


def terms_of(sections: Mapping[str, object]) -> StopTerms:
    """Return what a launch with these sections says; the usual terms where its options say nothing."""
    return cast(StopTerms, sections.get(NAME)) or StopTerms()


@frozen_record
class AskToStop:
    """Asks the ranks to stop at a step that they agree on. ``reason``: what ``stopping()`` returns."""

    reason: str


@frozen_record
class AskAll:
    """Asks the ranks of all machines to stop.

    Attributes:
        patience: Seconds after which machines that cannot answer are left out.
        unsure: True if nobody knows whether ranks call ``stopping()``. If none has, ``NobodyLooks`` is the answer.
    """

    reason: str
    patience: float
    unsure: bool


@frozen_record
class NobodyLooks:
    """No rank of any machine has called ``stopping()``."""


@frozen_record
class FreezeRanks:
    """Makes the ranks' next looks wait, and asks how many there were. ``reason``: why they are to stop."""

    reason: str


@frozen_record
class RanksFrozen:
    """All of a machine's ranks that still work wait at their next look. ``looks``: the most that one has had."""

    call: int
    looks: int


@frozen_record
class ThawRanks:
    """Tells them to go on: a machine has not answered, and is asked again."""


@frozen_record
class StopRanks:
    """Says at which look the ranks of all machines stop."""

    look: int
    reason: str


@frozen_record
class StopAgreed:
    """The ranks stop at their look of this number. ``asked``: when that was asked for, in seconds of the epoch."""

    reason: str
    asked: float
    look: int


@frozen_record
class StopOverdue:
    """Half of the time to stop is over, and ranks go on: why, for people. ``left``: seconds that remain."""

    why: str
    seconds: float
    left: float


@frozen_record
class FreezeLooks:
    """Makes the rank's next look in this call (``mlaunch.stopping``) wait, and asks how many there were."""

    call: int


@frozen_record
class TellLooks:
    """Asks how many looks there were in this call."""

    call: int


@frozen_record
class ThawLooks:
    """Tells a look that waits to go on: there is no decision."""

    call: int


@frozen_record
class StopAtLook:
    """Says at which look of this call all ranks stop."""

    call: int
    look: int
    reason: str


StopOrder = FreezeRanks | ThawRanks | StopRanks | NobodyLooks  # of the gate

ANSWER_TIMEOUT = 1.0  # seconds for all to tell their counts: those that have told them may wait as long
PAUSE = 1.0  # seconds in which they go on before they are asked again
_MOST_LOOKS = 1 << 53


def is_look(said: object) -> TypeGuard[int]:
    """True if what another machine says can be a number of looks."""
    return type(said) is int and 0 <= said <= _MOST_LOOKS  # not isinstance(), by which JSON's true is one


class Members(Protocol):
    """Those that have to agree, by number."""

    def working(self) -> Collection[int]:
        """Return those that have not ended."""

    def freeze(self, member: int) -> None:
        """Make its looks wait, and ask for its count."""

    def thaw(self, member: int) -> None:
        """Tell it to go on."""

    def stop_at(self, member: int, look: int) -> None:
        """Tell it where to stop, so that it continues until then."""


class Freeze:
    """Members that are asked to wait. ``look``: where they stop, once that is known."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._asked: set[int] = set()  # who has not answered
        self._open = False
        self.counts: dict[int, int] = {}  # by those who wait
        self.look: int | None = None

    @property
    def all_wait(self) -> bool:
        """True if all who work wait; also if nobody works any more."""
        return self._open and all(member in self.counts for member in self._members.working())

    @property
    def complete(self) -> bool:
        """True if all who work wait, and somebody does."""
        return bool(self.counts) and self.all_wait

    def begin(self) -> None:
        """Freeze all. One that has not answered yet is not asked twice."""
        self._open = True
        for member in self._members.working():
            if member not in self._asked:
                self._asked.add(member)
                self._members.freeze(member)

    def take(self, member: int, looks: int) -> None:
        """Take a count. A member that answers too late gets what the others have come to."""
        self._asked.discard(member)
        if self.look is not None:
            self._members.stop_at(member, self.look)
        elif self._open:
            self.counts[member] = looks
        else:
            self._members.thaw(member)

    def thaw(self) -> None:
        """Tell all who wait to go on."""
        frozen, self.counts, self._open = list(self.counts), {}, False
        for member in frozen:
            self._members.thaw(member)

    def stop_at(self, look: int) -> None:
        """Tell all where to stop."""
        self.look = look
        for member in self._members.working():
            self._members.stop_at(member, look)


class AgreedStop:
    """How members come to agree: the same for ranks in their agent, and for machines in an engine's caller or the gate.

    Attributes:
        asked_by: Who is to know if nobody calls ``stopping()``; None: the options say that ranks do.
        unused: True if nobody does. The members go on then, and do not stop.
    """

    def __init__(self, members: Members, clock: Callable[[], float], asked_by: int | None = None) -> None:
        self._clock = clock
        self.freeze = Freeze(members)
        self.asked_by = asked_by
        self.unused = False
        self._is_used = asked_by is None
        self._round_ends = self._next_at = self._without_at = float("inf")

    @property
    def look(self) -> int | None:
        """Where all stop; None: that is not agreed."""
        return self.freeze.look

    @property
    def due(self) -> float:
        """When the next step is due, on the clock; infinity: never."""
        return min(self._round_ends, self._next_at)

    def begin(self, patience: float) -> None:
        """Begin. ``patience``: seconds after which those who cannot answer are left out."""
        self._without_at = self._clock() + patience
        self._begin_round()

    def _begin_round(self) -> None:
        self._next_at, self._round_ends = float("inf"), self._clock() + ANSWER_TIMEOUT
        self.freeze.begin()

    def take_steps(self) -> bool:
        """Take the steps that are due; True once: all have agreed, or nobody looks (``unused``)."""
        now, counts = self._clock(), self.freeze.counts
        if self.due == float("inf"):
            return False
        if not self._is_used and (self.freeze.complete or now >= self.due):
            self._is_used = any(counts.values())
            self.unused = not self._is_used
        if self.unused:
            self.freeze.thaw()
        elif self.freeze.complete or (now >= self._round_ends and now >= self._without_at and counts):
            # Plus one: the rank with the highest count has that look behind it, and has gone on.
            self.freeze.stop_at(max(counts.values()) + 1)
        else:
            self._go_on(now)
            return False
        self._round_ends = self._next_at = float("inf")
        return True

    def _go_on(self, now: float) -> None:
        """End a round in which not all have answered, and begin the next one after a pause."""
        if now >= self._round_ends:
            # Those that wait are at work again meanwhile: a rank that cannot answer costs the others half of the time
            # at most.
            self.freeze.thaw()
            self._round_ends, self._next_at = float("inf"), now + PAUSE
        if now >= self._next_at:
            self._begin_round()
