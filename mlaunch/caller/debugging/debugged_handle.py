"""A launch whose caller debugs: between its steps it asks the user what ranks are to do that have stopped."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from mlaunch.base import linux
from mlaunch.base.text import name_ranks
from mlaunch.caller.debugging import asking, words
from mlaunch.caller.debugging.prompts import Prompts
from mlaunch.caller.debugging.words import ForRanks, TellWho
from mlaunch.caller.launch.handle import LaunchHandle
from mlaunch.protocol import failures
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages.debug_messages import PromptLine
from mlaunch.protocol.messages.launch_messages import RankStarted


class DebuggedHandle(LaunchHandle):
    """Driven by ``wait`` alone, in the main thread."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._debuggers: dict[int, Channel] = {}  # of ranks
        self._prompts = Prompts(self.relay.output.write)
        self._goes_on = True

    def timeout(self) -> float | None:
        due = (super().timeout(), None if self._is_ending else self._prompts.timeout())
        return min((seconds for seconds in due if seconds is not None), default=None)

    def step(self) -> bool:
        """Takes in what has come; then it asks the user, if a rank waits for that. False after the last word."""
        self._goes_on = super().step()
        while self._goes_on and not self._is_ending and (found := self._prompts.next()) is not None:
            self._ask(*found)
        return self._goes_on

    def close(self) -> None:
        super().close()
        for channel in self._debuggers.values():
            channel.close()

    @property
    def _is_ending(self) -> bool:
        return self.ending or self.outcome.failed

    # What ranks say

    def _show(self, record: object, fds: Sequence[int]) -> None:
        if isinstance(record, RankStarted):
            channel = self._debuggers[record.rank] = Channel.adopt(fds[0])
            self.relay.watch(channel.fileno())
            fds = fds[1:]
        super()._show(record, fds)

    def _take_answers(self, ready: set[int]) -> None:
        for rank, channel in list(self._debuggers.items()):
            if channel.fileno() in ready:
                self._listen(rank, channel)
        if self._prompts.quit is not None and not self._is_ending:
            self.end_stalled(failures.from_debugger(*self._prompts.quit))

    def _listen(self, rank: int, channel: Channel) -> None:
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
            self.relay.output.write(self._who(rank))
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
            self.relay.output.write(f"{name_ranks(others)} of {self.spec.name}: not at a prompt; {self._who(-1)}")
        return not others

    def _who(self, present: int) -> str:
        """Says where each rank is, a line each."""
        stopped = self._prompts.stopped()
        lines = [f"{'*' if rank == present else ' '} rank {rank} at {place}\n" for rank, place in stopped.items()]
        others = [rank for rank in self.history.started if rank not in stopped]
        return "".join([*lines, *([f"  {name_ranks(others)}: running\n"] if others else [])])
