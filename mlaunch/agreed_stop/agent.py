"""The agent's part of an agreed stop: its ranks agree on a step, get a notice at half time, and are ended at last.

    asked --agreed--> saving --all have returned--> over
      |                 |
      +---- half of the time: a notice ---- all of it: a failure, as a deadline that has passed

For an engine's machines, the caller runs the agreement, and this agent only freezes its ranks and reports. The same
holds for machines with a caller each, for which the gate runs the agreement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlaunch.agreed_stop.wire import (
    AgreedStop,
    AskAll,
    AskToStop,
    CountChecks,
    Freeze,
    FreezeChecks,
    FreezeRanks,
    NobodyChecks,
    RanksFrozen,
    StopAgreed,
    StopAtCheck,
    StopOverdue,
    StopRanks,
    ThawChecks,
    terms_of,
)
from mlaunch.base.text import name_some_ranks
from mlaunch.core.parts import AgentPart
from mlaunch.protocol import failures

if TYPE_CHECKING:
    from mlaunch.agent.scene import Scene

ANSWER_TIMEOUT = 0.3  # seconds for ranks to report how often they have checked
_NEVER = float("inf")


@dataclass
class RankMembers:
    """The ranks of one call, as the members that agree."""

    scene: Scene
    call: int = 0
    reason: str = ""
    take: Callable[[int, int], None] = field(default=lambda _rank, _checks: None)

    def working(self) -> Collection[int]:
        return self.scene.working()

    def freeze(self, member: int) -> None:
        self.scene.ask(member, FreezeChecks(self.call), self.take)

    def thaw(self, member: int) -> None:
        self.scene.tell(member, ThawChecks(self.call))

    def stop_at(self, member: int, check: int) -> None:
        self.scene.tell(member, StopAtCheck(self.call, check, self.reason))


class StopRequest(AgentPart):
    """The request to stop the current call, on this machine."""

    def __init__(self, scene: Scene) -> None:
        self._scene, self._members, self._clock = scene, RankMembers(scene), scene.clock
        terms = terms_of(scene.sections)
        self._expected, self._grace = terms.expected, terms.grace
        self._has_asked = False  # it has asked the other machines
        self._asked_at = 0.0
        self._freeze: Freeze | None = None  # this machine's part
        self._agreed: AgreedStop | None = None  # the agreement, if this agent runs it
        self._checks: dict[int, int | None] = {}
        self._half_at = self._end_at = self._tell_at = _NEVER
        self._said = False
        self._asked_by: int | None = None  # the process whose ``mlaunch stop`` must learn if no rank checks

    @property
    def looks_for_answers(self) -> bool:
        """True while the ranks of a call are asked to stop: only then it reminds them."""
        return self._freeze is not None and bool(self._members.reason)

    def due(self) -> list[float]:
        times = [self._half_at, self._end_at, self._tell_at, _NEVER if self._agreed is None else self._agreed.due]
        return [at for at in times if at < _NEVER]

    def hear(self, word: object, call: int, *_fds: int) -> None:
        if call != self._scene.call:  # the call is over, or ranks that stay have none
            return
        if isinstance(word, AskToStop):
            self._ask(word.reason)
        elif isinstance(word, FreezeRanks):
            self._freeze_for_others(word.reason)
        elif self._freeze is not None and isinstance(word, StopRanks):
            self._freeze.stop_at(word.check)
        elif self._freeze is not None:
            self._freeze.thaw()

    def visited(self, pid: int) -> None:
        """Ask the ranks to stop, for the process that has run ``mlaunch stop``."""
        if not self._members.working():
            self._give_up(pid)
        else:
            self._ask("asked", None if self._expected else pid)

    def _ask(self, reason: str, by: int | None = None) -> None:
        """Ask the ranks to stop. A second request changes nothing."""
        if self._scene.machines_agree:
            if not self._has_asked:
                self._has_asked, self._asked_by = True, by
                self._scene.tell_machines(AskAll(reason, self._grace / 2, by is not None))
        elif self._freeze is None and self._members.working():
            self._agreed = AgreedStop(self._members, self._clock, by)
            self._begin(self._agreed.freeze, reason)
            self._agreed.begin(self._grace / 2)

    def hear_machines(self, word: object) -> None:
        """Follow an order of the gate, which runs the agreement of all machines."""
        if isinstance(word, NobodyChecks):
            if self._asked_by is not None:
                self._give_up(self._asked_by)
            return
        self.hear(word, self._scene.call)
        if self._freeze is not None and isinstance(word, StopRanks):
            self._scene.say(StopAgreed(word.reason, self._asked_at, word.check))

    def _freeze_for_others(self, reason: str) -> None:
        if self._freeze is None:
            self._begin(Freeze(self._members), reason)
        if self._freeze is not None:
            self._said = False
            self._freeze.begin()

    def _begin(self, freeze: Freeze, reason: str) -> None:
        self._freeze, self._members.call, self._members.reason = freeze, self._scene.call, reason
        self._members.take = freeze.take
        self._asked_at = time.time()
        self._half_at, self._end_at = self._clock() + self._grace / 2, self._clock() + self._grace

    def take_steps(self) -> None:
        if self._freeze is None:
            return
        if self._agreed is not None:
            self._agree(self._agreed)
        elif self._freeze.all_wait and not self._said:
            self._said = True
            frozen = RanksFrozen(self._members.call, max(self._freeze.counts.values(), default=0))
            if self._scene.machines_agree:
                self._scene.tell_machines(frozen)
            else:
                self._scene.say(frozen)
        if self._clock() >= min(self._half_at, self._end_at):
            self._ask_checks()
        if self._clock() >= self._tell_at:
            self._tell()

    def _agree(self, agreed: AgreedStop) -> None:
        if agreed.take_steps():
            if agreed.check is not None:
                self._scene.say(StopAgreed(self._members.reason, self._asked_at, agreed.check))
            elif agreed.asked_by is not None:
                self._give_up(agreed.asked_by)

    def _give_up(self, asked_by: int) -> None:
        """End the launch, because no rank calls ``stopping()``."""
        self.over()
        self._scene.fail(failures.from_stop(asked_by), whole=True)

    def _ask_checks(self) -> None:
        self._half_at = _NEVER
        self._tell_at = self._clock() + ANSWER_TIMEOUT
        self._end_at = _NEVER if self._clock() >= self._end_at else self._end_at
        self._checks = dict.fromkeys(self._members.working(), None)
        for rank in self._checks:
            self._scene.ask(rank, CountChecks(self._members.call), self._checks.__setitem__)

    def _tell(self) -> None:
        """Report why ranks still work: to the caller at half time, and as the failure that ends them at last."""
        self._tell_at = _NEVER
        working = self._members.working()
        check = self._freeze.check if self._freeze is not None else None
        why = why_not(check, {rank: count for rank, count in self._checks.items() if rank in working})
        if not why:
            return
        if self._end_at < _NEVER:
            self._scene.say(StopOverdue(why, self._grace / 2, self._grace / 2))
        else:
            at = time.strftime("%H:%M:%S", time.localtime(self._asked_at))
            what = f"did not stop within {self._grace:g} s of being asked to at {at} ({self._members.reason}): {why}"
            self.over()
            behind = [rank for rank in working if (count := self._checks.get(rank)) is None or count < (check or 1)]
            self._scene.fail(failures.of_run(what, "stop_overdue", waited_for=behind))

    def over(self) -> None:
        """Forget the request."""
        self._freeze = self._agreed = None
        self._half_at = self._end_at = self._tell_at = _NEVER


part = StopRequest


def why_not(check: int | None, checks: Mapping[int, int | None]) -> str:
    """Return in words why ranks still work.

    Args:
        check: The check at which all should stop; None: they have not agreed.
        checks: How often each rank has called ``mlaunch.stopping()``; None: its control thread does not answer.
    """
    silent = [rank for rank, count in checks.items() if count is None]
    counts = {rank: count for rank, count in checks.items() if count is not None}
    never = [rank for rank, count in counts.items() if count == 0]
    behind = {rank: count for rank, count in counts.items() if check is not None and 0 < count < check}
    heard = [rank for rank, count in counts.items() if check is not None and count >= check]
    parts = []
    if silent:
        parts.append(f"{name_some_ranks(silent)} cannot answer (C code holds the interpreter lock, or the process is "
                     f"stopped)")  # fmt: skip
    if never:
        parts.append(f"{name_some_ranks(never)} never called mlaunch.stopping()")
    if behind and max(behind.values()) - min(behind.values()) > 1:
        counted = ", ".join(f"rank {rank}: {count} times" for rank, count in list(behind.items())[:8])
        parts.append(f"the ranks call mlaunch.stopping() unequally often ({counted}; all stop at call {check})")
    elif behind:
        parts.append(f"{name_some_ranks(list(behind))} did not call mlaunch.stopping() again")
    if heard:
        parts.append(f"{name_some_ranks(heard)} got the answer and continued")
    return "; ".join(parts)
