"""A request to stop, on this machine's ranks: they agree on the step, are reminded of at half time, and end at last.

    asked --agreed--> saving --all have returned--> over
      |                 |
      +---- half of the time: a notice ---- all of it: a failure, as a deadline that has passed

A caller who hears several machines agrees with all of them, and this agent only freezes and tells. So it does where the
gate agrees with machines that have a caller each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlaunch.agent.questions import Questions
from mlaunch.agent.rank_process import RankProcess
from mlaunch.agent.supervision.launch_state import Supervision
from mlaunch.base.exceptions import RankFailure
from mlaunch.base.text import name_some_ranks
from mlaunch.protocol import failures
from mlaunch.protocol.agreed_stop import AgreedStop, Freeze
from mlaunch.protocol.messages.control_messages import FreezeLooks, StopAtLook, TellLooks, ThawLooks
from mlaunch.protocol.messages.stop_messages import (
    AskAll,
    AskToStop,
    FreezeRanks,
    NobodyLooks,
    RanksFrozen,
    StopAgreed,
    StopOrder,
    StopOverdue,
    StopRanks,
    ThawRanks,
)

if TYPE_CHECKING:
    from mlaunch.protocol.messages.channels import AgentHears

ANSWER_TIMEOUT = 0.3  # seconds for ranks to tell how often they have looked
_NEVER = float("inf")


@dataclass
class RankMembers:
    """The ranks of one call, as those who agree."""

    ranks: Sequence[RankProcess]
    questions: Questions
    call: int = 0
    reason: str = ""
    take: Callable[[int, int], None] = field(default=lambda _rank, _looks: None)

    def working(self) -> Collection[int]:
        known = set(self.questions.ranks())
        return [rank.rank for rank in self.ranks if rank.working and rank.rank in known]

    def freeze(self, member: int) -> None:
        self.questions.ask(member, FreezeLooks(self.call), self.take)

    def thaw(self, member: int) -> None:
        self.questions.tell(member, ThawLooks(self.call))

    def stop_at(self, member: int, look: int) -> None:
        self.questions.tell(member, StopAtLook(self.call, look, self.reason))


class StopRequest:
    """The request to stop, on this machine, for the call that runs."""

    def __init__(self, scene: Supervision, questions: Questions) -> None:
        self._members, self._launcher = RankMembers(scene.ranks, questions), scene.launcher
        self._peers = scene.peers if scene.peers.agree else None
        self._has_asked = False  # the others
        self._expected, self._grace = bool(scene.stop_on), scene.stop_grace
        self._clock = scene.system.clock
        self._asked_at = 0.0
        self._freeze: Freeze | None = None  # this machine's part
        self._agreed: AgreedStop | None = None  # if it is all of it
        self._looks: dict[int, int | None] = {}
        self._half_at = self._end_at = self._tell_at = _NEVER
        self._said = False
        self._asked_by: int | None = None  # the process whose ``mlaunch stop`` it was
        self._failure: RankFailure | None = None  # the time is over, or nobody would ever hear of it
        self.unused = False  # no rank asks ``stopping()``, so that what asks for an end has to end the launch

    @property
    def reason(self) -> str:
        """Why they are to stop; "": they are not."""
        return self._members.reason if self._freeze is not None else ""

    def due(self) -> list[float]:
        """Returns when ``take_steps`` is to be called though nothing has come."""
        times = [self._half_at, self._end_at, self._tell_at, _NEVER if self._agreed is None else self._agreed.due]
        return [at for at in times if at < _NEVER]

    def obey(self, record: AgentHears | None, call: int) -> bool:
        """Does what a launcher wants in the present call; False if the record is about something else."""
        if not isinstance(record, AskToStop | FreezeRanks | ThawRanks | StopRanks):
            return False
        if record.call != call:  # it is over, or ranks that stay have none
            return True
        if isinstance(record, AskToStop):
            self.ask(record.reason, call)
        elif isinstance(record, FreezeRanks):
            self._freeze_for_others(record.reason, call)
        elif self._freeze is not None and isinstance(record, StopRanks):
            self._freeze.stop_at(record.look)
        elif self._freeze is not None:
            self._freeze.thaw()
        return True

    def ask(self, reason: str, call: int, by: int | None = None) -> None:
        """Asks the ranks; to ask again changes nothing. ``by``: the process that asks by ``mlaunch stop``."""
        self._asked_by = by
        if by is not None and not self._members.working():
            self._give_up(by)
        elif self._peers is not None and not self._has_asked:
            self._has_asked = True
            self._peers.say(AskAll(reason, self._grace / 2, by is not None and not self._expected))
        elif self._peers is None and self._freeze is None and self._members.working():
            self._agreed = AgreedStop(self._members, self._clock)
            self._begin(self._agreed.freeze, reason, call)
            self._agreed.begin(self._grace / 2)

    def hear_gate(self, order: StopOrder, call: int) -> None:
        """Does what the gate wants, as all machines have to agree."""
        if isinstance(order, NobodyLooks):
            if self._asked_by is not None:
                self._give_up(self._asked_by)
        elif isinstance(order, FreezeRanks):
            self._freeze_for_others(order.reason, call)
        elif self._freeze is not None and isinstance(order, StopRanks):
            self._freeze.stop_at(order.look)
            self._launcher.try_send(StopAgreed(order.reason, self._asked_at, order.look))
        elif self._freeze is not None:
            self._freeze.thaw()

    def _freeze_for_others(self, reason: str, call: int) -> None:
        if self._freeze is None:
            self._begin(Freeze(self._members), reason, call)
        if self._freeze is not None:
            self._said = False
            self._freeze.begin()

    def _begin(self, freeze: Freeze, reason: str, call: int) -> None:
        self._freeze, self._members.call, self._members.reason = freeze, call, reason
        self._members.take = freeze.take
        self._asked_at = time.time()
        self._half_at, self._end_at = self._clock() + self._grace / 2, self._clock() + self._grace

    def take_steps(self) -> None:
        """Takes the steps that are due."""
        if self._freeze is None:
            return
        if self._agreed is not None:
            self._agree(self._agreed)
        elif self._freeze.all_wait and not self._said:
            self._said = True
            frozen = RanksFrozen(self._members.call, max(self._freeze.counts.values(), default=0))
            if self._peers is not None:
                self._peers.say(frozen)
            else:
                self._launcher.try_send(frozen)
        if self._clock() >= min(self._half_at, self._end_at):
            self._ask_looks()
        if self._clock() >= self._tell_at:
            self._tell()

    def _agree(self, agreed: AgreedStop) -> None:
        if agreed.look is None and not self._expected and (agreed.freeze.complete or self._clock() >= agreed.due):
            if not any(agreed.freeze.counts.values()) and self._asked_by is not None:
                agreed.freeze.thaw()
                self._give_up(self._asked_by)
                return
            self._expected = True
        if agreed.take_steps() and agreed.look is not None:
            self._launcher.try_send(StopAgreed(self._members.reason, self._asked_at, agreed.look))

    def _give_up(self, asked_by: int) -> None:
        """Leaves it to the supervisor to end the launch, as no rank looks."""
        self.unused, self._failure = True, failures.from_stop(asked_by)
        self.clear()

    def take_failure(self) -> RankFailure | None:
        """Returns why the ranks are to be ended, once."""
        failure, self._failure = self._failure, None
        return failure

    def _ask_looks(self) -> None:
        self._half_at = _NEVER
        self._tell_at = self._clock() + ANSWER_TIMEOUT
        self._end_at = _NEVER if self._clock() >= self._end_at else self._end_at
        self._looks = dict.fromkeys(self._members.working(), None)
        for rank in self._looks:
            self._members.questions.ask(rank, TellLooks(self._members.call), self._looks.__setitem__)

    def _tell(self) -> None:
        """Tells why ranks still work: the launcher at half time, and whoever ends them at last."""
        self._tell_at = _NEVER
        working = self._members.working()
        look = self._freeze.look if self._freeze is not None else None
        why = why_not(look, {rank: count for rank, count in self._looks.items() if rank in working})
        if not why:
            return
        if self._end_at < _NEVER:
            self._launcher.try_send(StopOverdue(why, self._grace / 2, self._grace / 2))
        else:
            at = time.strftime("%H:%M:%S", time.localtime(self._asked_at))
            what = f"did not stop within {self._grace:g} s of being asked to at {at} ({self.reason}): {why}"
            self._failure = failures.from_overdue_stop(what)
            self.clear()

    def clear(self) -> None:
        """Forgets the request: the call is over."""
        self._freeze = self._agreed = None
        self._half_at = self._end_at = self._tell_at = _NEVER


def why_not(look: int | None, looks: Mapping[int, int | None]) -> str:
    """Says what is known of ranks that still work.

    ``look``: where all were to stop; None: they have not agreed. ``looks``: how often each has asked
    ``mlaunch.stopping()``; None: its control thread does not answer.
    """
    silent = [rank for rank, count in looks.items() if count is None]
    counts = {rank: count for rank, count in looks.items() if count is not None}
    never = [rank for rank, count in counts.items() if count == 0]
    behind = {rank: count for rank, count in counts.items() if look is not None and 0 < count < look}
    heard = [rank for rank, count in counts.items() if look is not None and count >= look]
    parts = []
    if silent:
        parts.append(f"{name_some_ranks(silent)} cannot answer (C code holds the interpreter lock, or the process is "
                     f"stopped)")  # fmt: skip
    if never:
        parts.append(f"{name_some_ranks(never)} never asked mlaunch.stopping()")
    if behind and max(behind.values()) - min(behind.values()) > 1:
        counted = ", ".join(f"rank {rank} {count} times" for rank, count in list(behind.items())[:8])
        parts.append(f"the ranks ask unequally often ({counted}; all stop at time {look})")
    elif behind:
        parts.append(f"{name_some_ranks(list(behind))} did not ask mlaunch.stopping() again")
    if heard:
        parts.append(f"{name_some_ranks(heard)} got the answer and went on")
    return "; ".join(parts)
