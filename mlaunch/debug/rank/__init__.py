"""A rank whose caller debugs, or that an IDE debugs; and a rank that somebody visits.

caller -> agent -> control thread --the rank's end of a channel--> main thread: Debugger
visitor -> agent -> control thread --a connection--> Visit
"""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from mlaunch.base.fds import close_in_forks
from mlaunch.core.parts import RankPart
from mlaunch.debug.rank.breakpoints import BreakpointHook
from mlaunch.debug.wire import PROMPT, DebugTerms, HoldLimits, OpenPrompt, PromptSays
from mlaunch.protocol.channel import TEXT_LIMIT, Channel
from mlaunch.rank import device, group

if TYPE_CHECKING:
    from mlaunch.debug.rank.ide import FollowedSession, IdeSession
    from mlaunch.debug.rank.rank_pdb import Debugger
    from mlaunch.debug.wire import RanksEnd
    from mlaunch.protocol.spec import LaunchSpec
    from mlaunch.torch_parts.process_groups import HeldLimits


_given: queue.SimpleQueue[RanksEnd] = queue.SimpleQueue()  # the channel to the caller
_held: list[HeldLimits] = []  # one, once somebody visits


class DebuggedRank(RankPart):
    """The feature's part of a rank. ``way``: as in DebugTerms."""

    def __init__(self, way: str, rank: int) -> None:
        self._way, self._rank = way, rank
        self._who = ""  # "rank 1 of train()"
        self._session: Debugger | FollowedSession | IdeSession | None = None

    def begin(self, spec: LaunchSpec, local_rank: int) -> Mapping[str, str]:
        self._who = f"rank {spec.rank(local_rank)} of {spec.call.name}"
        return {}

    def before_join(self) -> None:
        # Before the ranks join: the limit of a collective that others are in already cannot be changed.
        group.lift_limits()
        self._session = self._debugger() if self._way == PROMPT else self._ide()

    def around_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        session = self._session
        if session is None:
            return function
        return lambda *args, **kwargs: session.run(function, *args, **kwargs)

    def _debugger(self) -> Debugger:
        from mlaunch.debug.rank.rank_pdb import Debugger  # imports pdb

        channel = _given.get()
        close_in_forks(channel)  # a fork would take lines from it
        debugger = Debugger(channel, self._rank, self._who)
        sys.breakpointhook = BreakpointHook(self._who, debugger, os.getpid())
        debugger.install()
        return debugger

    def _ide(self) -> FollowedSession | IdeSession | None:
        from mlaunch.debug.rank import ide

        if ide.is_followed(self._way):
            return ide.FollowedSession(self._way, self._who)
        return ide.IdeSession(self._who) if ide.is_awaited(self._way, self._rank) else None


def part(section: object, rank: int) -> DebuggedRank:
    """Return the part of a rank that is debugged."""
    return DebuggedRank(cast(DebugTerms, section).way, rank)


def at_breakpoint(who: str, pid: int) -> Callable[..., Any]:
    """Return the function for ``breakpoint()`` in a rank that nobody debugs, or in its child. ``pid``: the rank's."""
    return BreakpointHook(who, None, pid).__call__


def hear(word: OpenPrompt | HoldLimits, fd: int = -1) -> None:
    """Take a debugger's channel, or note that a visitor comes or goes. Called by the control thread."""
    if isinstance(word, HoldLimits):
        _hold_limits(word.held)
    elif word.at_once:
        _attach_visitor(word, fd)
    else:
        _given.put(Channel.adopt(fd))


def _attach_visitor(word: OpenPrompt, fd: int) -> None:
    """Give a visitor a debugger in this rank."""
    try:
        from mlaunch.debug.rank import visit  # imports pdb

        visit.begin(os.dup(fd), word.rank, word.who)
    except Exception as error:  # a user's module shadows Python's, or no descriptor is left
        told = f"{word.who} cannot be debugged: {type(error).__name__}: {error}"[:TEXT_LIMIT]
        visitor: RanksEnd = Channel.adopt(os.dup(fd))
        visitor.try_send(PromptSays(f"{told}\n"))
    finally:
        os.close(fd)


def _hold_limits(held: bool) -> None:
    """Lift limits for a visitor; restore them, and end the visit, once it has gone."""
    if held or _held:
        from mlaunch.torch_parts.process_groups import HeldLimits

        _held[:] = _held or [HeldLimits()]
    if held:
        _held[0].hold(device.limit(None))
    else:
        for limits in _held:
            limits.give_back()
        if (visit := sys.modules.get("mlaunch.debug.rank.visit")) is not None:
            visit.end()
