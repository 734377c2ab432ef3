"""``debug=``, and an IDE that debugs the caller: a call whose ranks are debugged, or which somebody visits."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mlaunch.base.misuse import misuse
from mlaunch.caller.options.trouble_options import ranks_of
from mlaunch.core import load
from mlaunch.core.notes import Note
from mlaunch.core.parts import CallerPart, Spell
from mlaunch.debug.caller import asking, ide_of_caller
from mlaunch.debug.wire import PROMPT, DebugTerms, Visited, has_prompts

if TYPE_CHECKING:
    from mlaunch.caller.launch.handle import LaunchHandle
    from mlaunch.caller.options.launch_options import Options
    from mlaunch.protocol.spec import LaunchSpec


class DebuggedCall(CallerPart):
    """Checks that somebody can be asked; its section says what ranks do."""

    def __init__(self, options: Options) -> None:
        self._debug = options.debug
        if options.debug is True:
            asking.check_place()
        elif options.debug and importlib.util.find_spec("debugpy") is None:
            raise misuse(ModuleNotFoundError(f"debug={options.debug!r} needs debugpy (extra: debug)"))
        # An IDE does not hear ranks of other machines.
        way = _way_of(options.debug) or ("" if options.engine is not None else ide_of_caller.address())
        self.section = DebugTerms(way) if way else None

    def planned(self, spec: LaunchSpec) -> None:
        if any(rank >= spec.world_size for rank in ranks_of(self._debug)):
            raise ValueError(
                f"debug={self._debug!r} with {spec.world_size} rank(s): allowed: ranks from 0 to {spec.world_size - 1}"
            )


def adapt(options: Options) -> Options:
    """Return the options of a call without clocks, which would count while somebody reads."""
    if not options.debug:
        return options
    deadline = options.deadline if options.debug is True else None  # it is held while there is a prompt
    stall = None if load.is_there("insight") else options.stall
    # A line that changes would stand below the prompt.
    return options.replaced({"timeout": None, "deadline": deadline, "stall": stall, "progress": False})


def _way_of(debug: bool | str) -> str:
    if isinstance(debug, bool):
        return PROMPT if debug else ""
    ranks = ranks_of(debug)
    return "debugpy:" + ",".join(map(str, ranks)) if ranks else "debugpy"


def part(options: Options, _spell: Spell) -> DebuggedCall:
    """Return what a call has whose ranks are debugged."""
    return DebuggedCall(options)


def noted(news: Visited, name: str) -> Note:
    """Return what a launch notes of a visitor who comes, or goes: no limit counts meanwhile."""
    by = "by" if news.held else "no more: it was by"
    return Note(f"{name} is debugged {by} mlaunch debug (pid {news.pid})", holds=news.held)


def handle(sections: Mapping[str, object], usual: type[LaunchHandle]) -> type[LaunchHandle]:
    """Return what drives a launch with these sections."""
    if not has_prompts(sections):
        return usual
    from mlaunch.debug.caller.debugged_handle import DebuggedHandle  # for this alone

    return DebuggedHandle
