"""What ``slow=`` asks for, and what its user sees of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlaunch.caller.options.trouble_options import parse_share
from mlaunch.core.notes import Note
from mlaunch.core.parts import CallerPart
from mlaunch.slow.wire import NAME, BeginToLook, SlowRanks, SlowTerms

if TYPE_CHECKING:
    from mlaunch.core.parts import Spell
    from mlaunch.protocol.spec import LaunchSpec

SECONDS = 30.0  # for which ranks are slow before the user sees it
EVERY = 2.0  # seconds between two looks


class SlowPart(CallerPart):
    """Has the agent of each attempt look for slow ranks."""

    def __init__(self, share: float, asked: str) -> None:
        self.section = SlowTerms(share, SECONDS, EVERY)
        self._asked = asked

    def planned(self, spec: LaunchSpec) -> None:
        """Raise ValueError where ranks of other machines take part, with which nobody here compares ours."""
        if spec.world_size != spec.local_world_size or spec.nodes.guessed:
            raise ValueError(f"{self._asked} with ranks on several machines: only ranks of one machine are compared; "
                             f"allowed: a launch on this machine")  # fmt: skip

    def attach(self, tell: Callable[[object], None]) -> None:
        tell(BeginToLook())


def part(options: Any, spell: Spell) -> SlowPart:
    """Make the caller's part."""
    return SlowPart(parse_share(options.slow), spell(NAME, options.slow))


def noted(news: object, name: str) -> Note:
    """Return what a launch of this name notes of what its agent says."""
    if isinstance(news, SlowRanks):
        return Note(f"{name}: {news.text}", {"slow_ranks": news})
    return Note()
