"""A launch whose caller debugs: between its steps it asks the user what ranks are to do that have stopped."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlaunch.base import linux
from mlaunch.base.text import name_ranks
from mlaunch.caller.debugging import asking, words
from mlaunch.caller.debugging.prompts import Prompts
from mlaunch.caller.debugging.words import ForRanks, TellWho
from mlaunch.caller.launch.handle import LaunchHandle
from mlaunch.caller.report import notebook
from mlaunch.caller.why_text import view_of
from mlaunch.protocol import failures, visitors
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages.debug_messages import HoldDeadline, PromptLine
from mlaunch.protocol.messages.launch_messages import RankStarted
from mlaunch.protocol.messages.status_messages import StatusTold, TellStatus
from mlaunch.protocol.visitors import WHY

if TYPE_CHECKING:
    from mlaunch.protocol.messages.channels import AgentSays, DebuggerHears, DebuggerSays

_WHO = -1  # the number of a question that the watch for stalls does not ask


class DebuggedHandle(LaunchHandle):
    """Driven by ``wait`` alone, in the main thread."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._debuggers: dict[int, Channel[DebuggerSays, DebuggerHears]] = {}  # of ranks
        self._prompts = Prompts(lambda text: self.relay.output.write(notebook.short_names(text)))
        self._goes_on = True
        self._holds = False  # the deadline
        self._tells_who = False  # to the user, once the agent has told it

    def timeout(self) -> float | None:
        due = (super().timeout(), None if self._is_busy else self._prompts.timeout())
        return min((seconds for seconds in due if seconds is not None), default=None)

    def step(self) -> bool:
        """Takes in what has come; then it asks the user, if a rank waits for that. False after the last word."""
        self._goes_on = super().step()
        while self._goes_on and not self._is_busy and (found := self._prompts.next()) is not None:
            self._ask(*found)
        return self._goes_on

    def close(self) -> None:
        super().close()
        for channel in self._debuggers.values():
            channel.close()

    @property
    def _is_ending(self) -> bool:
        return self.ending or self.outcome.failed

    @property
    def _is_busy(self) -> bool:
        return self._is_ending or self._tells_who

    # What ranks say

    def _show(self, record: AgentSays, fds: Sequence[int]) -> None:
        if isinstance(record, RankStarted):
            channel = self._debuggers[record.rank] = Channel.adopt(fds[0])
            self.relay.watch(channel.fileno())
            fds = fds[1:]
        if isinstance(record, StatusTold) and record.number == _WHO:
            self._tells_who = False
            self.relay.output.write(self._who(visitors.read_status(fds[0])["ranks"]))
        else:
            super()._show(record, fds)

    def _take_answers(self, ready: set[int]) -> None:
        for rank, channel in list(self._debuggers.items()):
            if channel.fileno() in ready:
                self._listen(rank, channel)
        if self._prompts.are_open != self._holds and not self._is_ending:
            self._holds = self._prompts.are_open
            self._limits.hold(self._holds)
            self.agent.try_send(HoldDeadline(self._holds))
        if self._prompts.quit is not None and not self._is_ending:
            rank, place = self._prompts.quit
            self.end_stalled(failures.from_debugger(rank, notebook.short_place(place)))

    def _listen(self, rank: int, channel: Channel[DebuggerSays, DebuggerHears]) -> None:
        try:
            while linux.wait_readable([channel.fileno()], 0.0):
                record, _ = channel.receive()
                self._prompts.take(rank, record)
        except EOFError:
            self._prompts.forget(rank)
            self.relay.unwatch(channel.fileno())
            self._debuggers.pop(rank).close()

    # What the user says

    def _ask(self, rank: int, prompt: str) -> None:
        """Asks for a line at the prompt of a rank, and does what it says."""
        self.relay.output.console.wait()
        try:
            line = asking.ask(prompt, functools.partial(self._drive, rank))
        except asking.WithdrawnError:
            return
        wish = ForRanks((rank,), None) if line is None else words.parse(line, rank)
        if isinstance(wish, ForRanks):
            self._pass_on(wish)
        elif isinstance(wish, TellWho):
            self._tells_who = True
            self.agent.try_send(TellStatus(_WHO, WHY))
        elif self._have_stopped([wish.rank]):
            self._prompts.switch(wish.rank)

    def _drive(self, rank: int, over: int) -> bool:
        """Drives the launch until ``over`` can be read; False if the rank waits for no answer any more."""
        while over not in linux.wait_readable([self.fileno(), over], super().timeout()):
            self._goes_on = super().step()
            if not self._goes_on or self._is_ending or rank not in self._prompts.stopped():
                return False
        return True

    def _pass_on(self, command: ForRanks) -> None:
        ranks = command.ranks or tuple(self._prompts.stopped())
        if self._have_stopped(ranks):
            self._prompts.answer(ranks)
            for rank in ranks:
                self._debuggers[rank].try_send(PromptLine(command.line))

    def _have_stopped(self, ranks: Sequence[int]) -> bool:
        """Tells whether they have; the user, too, if not."""
        stopped = self._prompts.stopped()
        others = [rank for rank in ranks if rank not in stopped]
        if others:
            self.relay.output.write(f"{name_ranks(others)} of {self.spec.name}: not at a prompt (who says more)\n")
        return not others

    def _who(self, ranks: Sequence[Mapping[str, Any]]) -> str:
        """Says where each rank is, a line each. ``ranks``: as the agent has told of them."""
        stopped = self._prompts.stopped()
        places = [(rank["rank"], stopped.get(rank["rank"]), view_of(rank).doing) for rank in ranks]
        return "".join(
            f"rank {rank} {f'has stopped at {notebook.short_place(at)}' if at else doing}\n"
            for rank, at, doing in places
        )
