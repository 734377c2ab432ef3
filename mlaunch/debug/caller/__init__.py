"""A call whose ranks are debugged: by ``debug=``, an IDE that debugs the caller, or ``mlaunch debug``."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mlaunch.base import linux
from mlaunch.base.exceptions import misuse
from mlaunch.caller.launch.handle import LaunchHandle
from mlaunch.caller.options.option_values import ranks_of
from mlaunch.caller.output.relay import Events
from mlaunch.caller.report import notebook
from mlaunch.core import load
from mlaunch.core.parts import CallerPart, Spell
from mlaunch.core.records import Note
from mlaunch.debug.caller import asking
from mlaunch.debug.caller.prompts import StoppedRanks, question
from mlaunch.debug.wire import NAME, PROMPT, DebugTerms, HoldDeadline, OpenPrompt, Visited, has_prompts
from mlaunch.protocol import failures, registry
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import AgentSays, ForPart, Question, RankStarted, Told

if TYPE_CHECKING:
    from mlaunch.caller.options.launch_options import Options
    from mlaunch.debug.wire import DebuggersEnd
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
    return DebuggedHandle if has_prompts(sections) else usual


_WHO = -1  # the number of this question; the watch for stalls uses others


class DebuggedHandle(LaunchHandle):
    """A launch that, between its steps, asks the user what stopped ranks do next.

    Only ``wait`` drives it, in the main thread.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._stopped = StoppedRanks(self.spec.call.name, self.relay.output.write, self._ask_who)
        self._prompts = self._stopped.prompts
        self._goes_on = True
        self._holds = False  # the deadline
        self._tells_who = False  # the user has asked for "who", and the agent has not answered yet

    def timeout(self) -> float | None:
        due = (super().timeout(), None if self._is_busy else self._prompts.timeout())
        return min((seconds for seconds in due if seconds is not None), default=None)

    def step(self, readable: Events | None = None) -> bool:
        """Take what has come; then ask the user, if a rank waits for that. False after the last word."""
        self._goes_on = super().step(readable)
        while self._goes_on and not self._is_busy and (found := self._prompts.next()) is not None:
            self._ask(*found)
        return self._goes_on

    def close(self) -> None:
        super().close()
        self._stopped.close()

    @property
    def _is_ending(self) -> bool:
        return self.ending or self.outcome.failed

    @property
    def _is_busy(self) -> bool:
        return self._is_ending or self._tells_who

    # What ranks say

    def _show(self, record: AgentSays, fds: Sequence[int]) -> None:
        if isinstance(record, RankStarted):
            self._open_prompt(record.rank)
        if isinstance(record, Told) and record.number == _WHO:
            self._tells_who = False
            self._stopped.tell_who(registry.read_status(fds[0])["ranks"])
        else:
            super()._show(record, fds)

    def _open_prompt(self, rank: int) -> None:
        """Give a rank that has started its end of a channel."""
        channel: DebuggersEnd
        channel, theirs = Channel.pair()
        with contextlib.closing(theirs):
            self.agent.try_send(ForPart(NAME, self._present_call, OpenPrompt(rank)), [theirs.fileno()])
        self._stopped.channels[rank] = channel
        self.relay.watch(channel.fileno())

    def _take_answers(self, ready: set[int]) -> None:
        for rank, channel in list(self._stopped.channels.items()):
            if channel.fileno() in ready and not self._stopped.hear(rank):
                self.relay.unwatch(channel.fileno())
                self._stopped.channels.pop(rank).close()
        # People think at a prompt for longer than a deadline lasts, so it does not count, here and in the agent.
        if self._prompts.are_open != self._holds and not self._is_ending:
            self._holds = self._prompts.are_open
            self._limits.hold(self._holds)
            self.tell_part(NAME, HoldDeadline(self._holds))
        if self._prompts.quit is not None and not self._is_ending:
            rank, place = self._prompts.quit
            where = f"at the prompt of rank {rank} ({notebook.short_place(place)})"
            self.end_for(failures.of_run(f"was ended from the debugger: q, or the end of input, {where}", "stopped"))

    # What the user says

    def _ask(self, rank: int, prompt: str) -> None:
        """Ask for a line at the prompt of a rank, and obey it."""
        # Otherwise output of ranks would come into the line that the user types.
        self.relay.output.console.wait()
        try:
            line = asking.ask(prompt, functools.partial(self._drive, rank))
        except asking.WithdrawnError:
            return
        self._stopped.obey(line, rank)

    def _ask_who(self) -> None:
        self._tells_who = True
        self.agent.try_send(Question(_WHO, question()))

    def _drive(self, rank: int, over: int) -> bool:
        """Drive the launch until ``over`` can be read; False if the rank no longer waits for an answer."""
        while over not in linux.wait_readable([self.fileno(), over], super().timeout()):
            self._goes_on = super().step()
            if not self._goes_on or self._is_ending or rank not in self._prompts.stopped():
                return False
        return True
