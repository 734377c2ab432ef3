"""A call whose ranks are debugged: by ``debug=``, an IDE that debugs the caller, or ``mlaunch debug``."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mlaunch.base.exceptions import misuse
from mlaunch.caller.options.option_values import ranks_of
from mlaunch.core import load
from mlaunch.core.parts import CallerPart, Spell
from mlaunch.core.records import Note
from mlaunch.debug.caller import asking
from mlaunch.debug.wire import PROMPT, DebugTerms, Visited, has_prompts

if TYPE_CHECKING:
    from mlaunch.caller.launch.handle import LaunchHandle
    from mlaunch.caller.options.launch_options import Options
    from mlaunch.protocol.spec import LaunchSpec


class DebuggedCall(CallerPart):
    """The feature's part of a call. ValueError: ``debug=True``, but nobody can be asked."""

    def __init__(self, options: Options) -> None:
        self._debug = options.debug
        if options.debug is True:
            asking.check_place()
        elif options.debug and importlib.util.find_spec("debugpy") is None:
            raise misuse(ModuleNotFoundError(f"debug={options.debug!r} needs debugpy (extra: debug)"))
        # Ranks on other machines do not reach the IDE.
        way = _way_of(options.debug) or ("" if options.engine is not None else _ide_of_caller())
        self.section = DebugTerms(way) if way else None

    def planned(self, spec: LaunchSpec) -> None:
        if any(rank >= spec.world_size for rank in ranks_of(self._debug)):
            raise ValueError(
                f"debug={self._debug!r} with {spec.world_size} rank(s): allowed: ranks from 0 to {spec.world_size - 1}"
            )


def adapt(options: Options) -> Options:
    """Return the options without limits, which would pass while the user reads."""
    if not options.debug:
        return options
    deadline = options.deadline if options.debug is True else None  # it is held while there is a prompt
    stall = None if load.is_there("insight") else options.stall
    # No line that changes: it would come below the prompt.
    return options.replaced({"timeout": None, "deadline": deadline, "stall": stall, "progress": False})


def _ide_of_caller() -> str:
    """Return where the IDE of this process waits for child processes, as ``rank/ide.py`` reads it; "" without one."""
    setup = getattr(getattr(sys.modules.get("pydevd"), "SetupHolder", None), "setup", None) or {}
    debugpy = getattr(sys.modules.get("debugpy"), "__file__", None)
    if not setup.get("multiprocess") or debugpy is None:
        return ""
    found = {
        "host": setup["client"],
        "port": setup["port"],
        "server_token": setup.get("access-token"),
        "client_token": setup.get("client-access-token"),
        "parent": os.getpid(),
        # An IDE brings its own debugpy, which is not among the user's packages.
        "path": os.path.dirname(os.path.dirname(debugpy)),
    }
    return json.dumps(found)


def _way_of(debug: bool | str) -> str:
    if isinstance(debug, bool):
        return PROMPT if debug else ""
    ranks = ranks_of(debug)
    return "debugpy:" + ",".join(map(str, ranks)) if ranks else "debugpy"


def part(options: Options, _spell: Spell) -> DebuggedCall:
    """Return the part of a call whose ranks are debugged."""
    return DebuggedCall(options)


def noted(news: Visited, name: str) -> Note:
    """Return the note that a visitor has come or gone. No limit counts between the two."""
    state = "is" if news.held else "is no longer"
    return Note(f"{name} {state} debugged by mlaunch debug (pid {news.pid})", holds=news.held)


def handle(sections: Mapping[str, object], usual: type[LaunchHandle]) -> type[LaunchHandle]:
    """Return the class that drives a launch with these sections."""
    if not has_prompts(sections):
        return usual
    from mlaunch.debug.caller.debugged_handle import DebuggedHandle  # only for this

    return DebuggedHandle
