"""Asks the ranks every few seconds what they have waited for, and tells the caller once if the same ones are slow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from mlaunch.base.text import in_seconds, name_some_ranks
from mlaunch.core.parts import AgentPart
from mlaunch.slow.agent.comparison import Comparison, Lateness, SlowVerdict
from mlaunch.slow.wire import NAME, BeginToLook, SlowRanks, TellWaits, WaitsOfRank

if TYPE_CHECKING:
    from mlaunch.agent.scene import Scene
    from mlaunch.slow.wire import SlowTerms

_NOTHING = "nothing to compare yet: no rank has waited for others, in collectives on CPUs or in DDP"


class SlowLookout(AgentPart):
    """Compares the ranks of the call that runs."""

    def __init__(self, scene: Scene) -> None:
        self._scene, self._clock = scene, scene.clock
        self._terms = cast("SlowTerms", scene.sections[NAME])
        self._comparison = Comparison(self._terms.seconds)
        self._next_at: float | None = None
        self._has_told = False
        self._slow: tuple[tuple[int, ...], float] = (), 0.0  # which ranks are, and since when

    def hear(self, word: object, call: int, *_fds: int) -> None:
        if isinstance(word, BeginToLook) and call == self._scene.call:
            self._next_at = self._clock() + self._terms.every
            self._ask()

    def due(self) -> list[float]:
        return [] if self._next_at is None else [self._next_at]

    def take_steps(self) -> None:
        if self._next_at is None or self._clock() < self._next_at:
            return
        self._next_at = self._clock() + self._terms.every
        self._comparison.conclude(self._clock())
        self._judge()
        self._ask()

    def _ask(self) -> None:
        for rank in self._scene.working():
            self._scene.ask(rank, TellWaits(), self._take)

    def _take(self, rank: int, told: WaitsOfRank | None) -> None:
        if told is not None:
            self._comparison.take(rank, told)

    def _judge(self) -> None:
        verdict = self._comparison.verdict(self._terms.share)
        if verdict is None or verdict.part < self._terms.share:
            self._slow = (), 0.0
            return
        if self._slow[0] != verdict.ranks:
            self._slow = verdict.ranks, time.time() - self._terms.every
        covered = self._comparison.covers(self._terms.seconds - 2 * self._terms.every)
        if covered and verdict.steadily and not self._has_told:
            self._has_told = True
            late = self._comparison.lateness(verdict.ranks) or Lateness(0.0, 0.0, 0.0)
            text = self._text(verdict, late)
            self._scene.say(SlowRanks(verdict.ranks, late.last, late.seconds, verdict.share, self._slow[1], text))

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

    def facts(self) -> Mapping[str, object]:
        """Return who is slow now, for ``mlaunch ps`` and ``mlaunch why``."""
        verdict = self._comparison.verdict(self._terms.share)
        if verdict is None or not self._comparison.waits:
            return {"text": _NOTHING}
        late = self._comparison.lateness(verdict.ranks) or Lateness(0.0, 0.0, 0.0)
        if verdict.part < self._terms.share and not late.once:
            return {"text": f"the others wait for no rank for more than {100 * self._terms.share:.3g}% of their time"}
        ranks = ",".join(map(str, verdict.ranks))
        return {"text": self._text(verdict, late), "ranks": ranks, "seconds": late.seconds, "share": verdict.share}

    def over(self) -> None:
        """Forget what was compared."""
        self._next_at, self._has_told, self._comparison = None, False, Comparison(self._terms.seconds)


part = SlowLookout
