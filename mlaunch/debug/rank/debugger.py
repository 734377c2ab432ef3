"""A rank whose caller debugs: it stops at ``breakpoint()`` and at its failure, and asks what to do."""

from __future__ import annotations

import builtins
import os
import pdb
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from mlaunch.debug.rank.rank_pdb import RankPdb
from mlaunch.debug.rank.talk import Talk
from mlaunch.rank import remote_error
from mlaunch.rank.setup import group

if TYPE_CHECKING:
    from mlaunch.debug.wire import RanksEnd


class Debugger:
    """Made once in a rank, before it joins its group. ``who``: "rank 1 of train()"."""

    def __init__(self, channel: RanksEnd, rank: int, who: str) -> None:
        self._talk = Talk(channel, rank)
        self._who = who
        self._pid = os.getpid()
        self._of_threads: dict[int, RankPdb] = {}
        self._has_examined = False

    def install(self) -> None:
        """Makes ``input`` ask the caller, and ``pdb.set_trace`` stop as ``breakpoint`` does; no collective hurries."""
        sys.settrace(None)  # of a debugger of the caller's, where this process is a fork of it
        threading.settrace(None)
        # A rank has no standard input; the caller's terminal is at the other end of the channel.
        builtins.input = self._input(builtins.input)
        pdb.set_trace = sys.breakpointhook
        group.lift_limits()

    def stop_at(self, frame: FrameType) -> None:
        """Opens a prompt at the next line of this frame, in this thread."""
        if not self._is_detached():
            thread = threading.get_ident()
            if thread not in self._of_threads:
                self._of_threads[thread] = self.make_debugger()
            self._of_threads[thread].set_trace(frame)

    def make_debugger(self) -> RankPdb:
        """Returns one for this thread."""
        return RankPdb(self._talk)

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs the function, and opens a prompt where it fails."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            # Before anything else runs: it would trace our own frames on the way out.
            sys.settrace(None)
            if not self._has_examined:
                self.examine(error)
            raise
        finally:
            sys.settrace(None)

    def step_into(self, function: Callable[..., Any], **values: Any) -> Any:
        """Runs the function, from a prompt at its first line on."""
        return self._of_threads.setdefault(threading.get_ident(), RankPdb(self._talk)).runcall(function, **values)

    def examine(self, error: BaseException) -> None:
        """Opens a prompt where an exception was raised, if it was in this rank; returns when it is to go its way."""
        # Of ranks that fail because of another one, only the first should ask: all others are at its mercy.
        if os.getpid() != self._pid or self._is_detached() or remote_error.is_of_another(str(error)):
            return
        self._has_examined = True
        debugger = RankPdb(self._talk, failed=True)
        with self._talk.turn(""):
            said = str(error).partition("\n")[0]
            self._talk.write(f"{self._who} raised {type(error).__name__}{': ' if said else ''}{said}\n")
            debugger.interaction(None, error.__traceback__)

    def _is_detached(self) -> bool:
        return any(debugger.detached for debugger in self._of_threads.values())

    def _input(self, usual: Callable[..., str]) -> Callable[..., str]:
        """Returns what ``input`` is to be; in a child of the rank it is the usual one."""
        return lambda prompt="", /: self._talk.ask(prompt) if os.getpid() == self._pid else usual(prompt)
