"""The watch that asks the ranks every few seconds how long they have waited, and reports slow ones once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from mlaunch.base.text import in_seconds, name_some_ranks
from mlaunch.core.parts import AgentPart
from mlaunch.slow.agent import other_machines
from mlaunch.slow.agent.comparison import Comparison, Lateness, SlowVerdict
from mlaunch.slow.wire import NAME, SlowRanks, TellWaits, WaitsOfRank

if TYPE_CHECKING:
    from mlaunch.agent.scene import Scene
    from mlaunch.slow.wire import SlowTerms

_NOTHING = "nothing to compare yet: no rank has waited for others, in collectives on CPUs or in DDP"


class SlowWatch(AgentPart):
    """The watch over the ranks of the current call; on the machine of rank 0, over the ranks of all machines."""

    def __init__(self, scene: Scene) -> None:
        self._scene, self._clock = scene, scene.clock
        self._terms = cast("SlowTerms", scene.sections[NAME])
        self._judges = scene.is_alone or any(rank.rank == 0 for rank in scene.ranks)
        self._next_at = self._clock() + self._terms.every
        self._forget()

    def _forget(self) -> None:
        self._comparison = Comparison(self._terms.seconds)
        self._has_told = False
        self._slow: tuple[tuple[int, ...], float] = (), 0.0  # the slow ranks, and since when they are
        self._told: dict[int, WaitsOfRank] = {}  # reports of this machine's ranks since the last comparison
        self._facts: Mapping[str, object] = {"text": _NOTHING}
        self._said: object = None  # the last message to the other machines

    def due(self) -> list[float]:
        return [self._next_at]

    def take_steps(self) -> None:
        if self._clock() < self._next_at:
            return
        self._next_at = self._clock() + self._terms.every
        told, self._told = self._told, {}
        if not self._judges:
            if told:
                self._scene.tell_machines(other_machines.word_of_waits(self._scene.call, told))
        else:
            self._compare(told)
        for rank in self._scene.working():
            self._scene.ask(rank, TellWaits(), self._take)

    def _take(self, rank: int, told: WaitsOfRank | None) -> None:
        if told is not None:
            self._told[rank] = told

    def hear_machines(self, word: Any) -> None:
        if self._judges:
            for rank, told in other_machines.waits_of_word(word, self._scene.call).items():
                self._comparison.take(rank, told)
            return
        facts, slow = other_machines.verdict_of_word(word)
        self._facts = facts or self._facts
        if slow is not None and self._scene.machines_agree:  # otherwise one caller receives the news of all machines
            self._scene.say(slow)

    def _compare(self, told: Mapping[int, WaitsOfRank]) -> None:
        for rank, waits in told.items():
            self._comparison.take(rank, waits)
        self._comparison.conclude(self._clock())
        slow = self._judge()
        self._facts = self._find_facts()
        if slow is not None:
            self._scene.say(slow)
        word = other_machines.word_of_verdict(self._facts, slow)
        if not self._scene.is_alone and word != self._said:
            self._said = word
            self._scene.tell_machines(word)

    def _judge(self) -> SlowRanks | None:
        """Return the slow ranks, once for each call."""
        verdict = self._comparison.verdict(self._terms.share)
        if verdict is None or verdict.part < self._terms.share:
            self._slow = (), 0.0
            return None
        if self._slow[0] != verdict.ranks:
            self._slow = verdict.ranks, time.time() - self._terms.every
        covered = self._comparison.covers(self._terms.seconds - 2 * self._terms.every)
        if self._has_told or not (covered and verdict.steadily):
            return None
        self._has_told = True
        late = self._comparison.lateness(verdict.ranks) or Lateness(0.0, 0.0, 0.0)
        text = self._text(verdict, late)
        return SlowRanks(verdict.ranks, late.last, late.seconds, verdict.share, self._slow[1], text)

    def _text(self, verdict: SlowVerdict, late: Lateness) -> str:
        who, verb = name_some_ranks(verdict.ranks), "is" if len(verdict.ranks) == 1 else "are"
        waits = f"the others wait {verdict.share:.0%} of their time"
        if late.once:
            return f"{who} held up the others once in the last {self._terms.seconds:g} s, for {in_seconds(late.once)}"
        at = time.strftime("%H:%M:%S", time.localtime(self._slow[1]))
        if not late.last:
            return f"{who} {verb} waited for since {at} ({waits})"
        often, each = f"{late.last:.0%} of the collectives since {at}", in_seconds(late.seconds)
        return f"{who} {verb} last into {often}, by {each} each ({waits})"

    def _find_facts(self) -> Mapping[str, object]:
        """Work out the facts about the ranks that are slow now."""
        verdict = self._comparison.verdict(self._terms.share)
        if verdict is None or not self._comparison.waits:
            return {"text": _NOTHING}
        late = self._comparison.lateness(verdict.ranks) or Lateness(0.0, 0.0, 0.0)
        if verdict.part < self._terms.share and not late.once:
            return {"text": f"the others wait for no rank for more than {100 * self._terms.share:.3g}% of their time"}
        ranks = ",".join(map(str, verdict.ranks))
        return {"text": self._text(verdict, late), "ranks": ranks, "seconds": late.seconds, "share": verdict.share}

    def facts(self) -> Mapping[str, object]:
        """Return the last facts about slow ranks, for ``mlaunch ps`` and ``mlaunch why``."""
        return self._facts

    def over(self) -> None:
        """Drop the comparison of the call that is over."""
        self._forget()


part = SlowWatch
