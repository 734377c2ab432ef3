"""A launch whose caller debugs: between its steps, it asks the user what stopped ranks do next."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlaunch.base import linux
from mlaunch.caller.launch.handle import LaunchHandle
from mlaunch.caller.output.relay import Events
from mlaunch.caller.report import notebook
from mlaunch.debug.caller import asking
from mlaunch.debug.caller.prompts import StoppedRanks, question
from mlaunch.debug.wire import NAME, HoldDeadline, OpenPrompt
from mlaunch.protocol import failures, visitors
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import AgentSays, ForPart, Question, RankStarted, Told

if TYPE_CHECKING:
    from mlaunch.debug.wire import DebuggersEnd

_WHO = -1  # the number of this question; the watch for stalls uses others


class DebuggedHandle(LaunchHandle):
    """A launch that asks the user at prompts. Only ``wait`` drives it, in the main thread."""

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
            self._stopped.tell_who(visitors.read_status(fds[0])["ranks"])
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
