"""In a rank: displays go to the notebook that has called, and widget bars become text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from mlaunch.core.parts import RankPart
from mlaunch.display.rank import rich_display, text_bars
from mlaunch.display.rank.rich_display import in_cell as in_cell
from mlaunch.display.wire import STREAM
from mlaunch.protocol.spec import LaunchSpec


class DisplayingRank(RankPart):
    """A rank of a notebook's launch; the first rank has a pipe to the notebook."""

    def begin(self, spec: LaunchSpec, local_rank: int) -> Mapping[str, str]:
        rich_display.install(self.pipes.get(STREAM, -1))
        return super().begin(spec, local_rank)


def part(_section: object, _rank: int) -> RankPart:
    return DisplayingRank()


def spec_of(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Return the spec of a module that is about to be imported; None: its own."""
    return text_bars.spec() if name == text_bars.NAME else rich_display.spec_of(path)


def change(module: ModuleType) -> None:
    """Change a module that a fork of the caller has imported already."""
    if module.__name__ == text_bars.NAME:
        text_bars.change(module)
