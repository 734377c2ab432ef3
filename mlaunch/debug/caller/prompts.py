"""Ranks that have stopped, and the prompt: which rank has it, and what a line at it does.

    running --asks--> waiting for its turn --> at the prompt --a line--> running

A rank that takes a step keeps the prompt for a moment, in which it mostly comes back. If several ranks got the same
command, their output is shown in the order of ranks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mlaunch.base import linux
from mlaunch.base.text import name_ranks
from mlaunch.caller.report import notebook
from mlaunch.core import load
from mlaunch.debug.wire import Onward, PromptAsks, PromptLeft, PromptLine, PromptSays
from mlaunch.protocol.channel import assert_never
from mlaunch.protocol.registry import STATUS

if TYPE_CHECKING:
    from mlaunch.debug.wire import DebuggersEnd, PromptTells

_PATIENCE = 1.0  # seconds for ranks that take a step

# What the caller obeys; all other lines are for the rank, whose pdb obeys them.
_SOME = re.compile(r"\s*ranks?\s+(?P<ranks>\d+(?:\s*,\s*\d+)*)\s+(?P<command>\S.*)")
_ALL = re.compile(r"\s*all\s+(?P<command>[^\s(=.\[].*)")  # not Python's: all(...), all = ..., all.x, all[0]
_SWITCH = re.compile(r"\s*switch\s+(?P<rank>\d+)\s*")


@dataclass(frozen=True)
class ForRanks:
    """A line for ranks. ``ranks`` empty: for all that have stopped. ``line`` None: there are no more."""

    ranks: tuple[int, ...]
    line: str | None


@dataclass(frozen=True)
class SwitchTo:
    """The command that gives the prompt to another rank."""

    rank: int


@dataclass(frozen=True)
class TellWho:
    """The command that asks what each rank does."""


def parse(line: str, rank: int) -> ForRanks | SwitchTo | TellWho:
    """Parse a line that was typed at this rank's prompt."""
    if found := _ALL.fullmatch(line):
        return ForRanks((), found["command"])
    if found := _SOME.fullmatch(line):
        return ForRanks(tuple(sorted({int(number) for number in found["ranks"].split(",")})), found["command"])
    if found := _SWITCH.fullmatch(line):
        return SwitchTo(int(found["rank"]))
    return TellWho() if line.strip() == "who" else ForRanks((rank,), line)


class Prompts:
    """The prompts of stopped ranks. ``show`` writes a text for the user; ``clock`` returns monotonic seconds."""

    def __init__(self, show: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._show = show
        self._clock = clock
        self._asking: dict[int, PromptAsks] = {}  # in the order in which they came
        self._said: dict[int, str] = {}  # not shown yet
        self._busy: set[int] = set()  # they run a command
        self._expected: set[int] = set()  # back from a step
        self._together = False  # several run it
        self._until = 0.0  # for those that are expected
        self._current: int | None = None
        self._fails = False  # a rank reports its failure, and the launch is about to end
        self.quit: tuple[int, str] | None = None  # the rank whose prompt has ended the launch, and its place

    def take(self, rank: int, record: PromptTells) -> None:
        """Take what a rank has sent."""
        match record:
            case PromptSays():
                self._said[rank] = self._said.get(rank, "") + record.text
                if rank == self._current and not self._together:
                    self._tell(rank)
            case PromptAsks():
                self._asking[rank] = record
                self._busy.discard(rank)
                self._expected.discard(rank)
            case PromptLeft():
                self._take_leave(rank, record)
            case _:
                assert_never(record)

    def _take_leave(self, rank: int, record: PromptLeft) -> None:
        self._busy.discard(rank)
        if record.how is Onward.STEPS:
            self._expected.add(rank)
            self._until = self._clock() + _PATIENCE
            return
        self._fails = self._fails or record.how is Onward.FAILS
        if record.how is Onward.QUITS:
            self.quit = rank, record.place
        if rank == self._current and not self._together:
            self._tell(rank)
            self._current = None

    def forget(self, rank: int) -> None:
        """Forget a rank that is gone; show what it has said last."""
        self._tell(rank)
        self._asking.pop(rank, None)
        self._busy.discard(rank)
        self._expected.discard(rank)

    def timeout(self) -> float | None:
        """Return the seconds until ``next`` has another answer even if nothing comes; None: never."""
        waits = self._expected and self._asking and not self._busy and not self._fails
        return max(0.0, self._until - self._clock()) if waits else None

    def next(self) -> tuple[int, str] | None:
        """Return the rank to ask now, and its prompt; None if there is none. Show what it has said."""
        waits = self._busy or (self._expected and self._clock() < self._until)
        if not self._asking or self._fails or waits:
            return None
        if self._together:
            for rank in sorted(self._said):
                self._tell(rank, marked=True)
            self._together = False
        if self._current is None or self._current not in self._asking:
            self._current = next(iter(self._asking))
        self._tell(self._current)
        return self._current, self._asking[self._current].prompt

    @property
    def are_open(self) -> bool:
        """True if a rank has stopped, runs a command, or is expected back from a step."""
        return bool(self._asking or self._busy or self._expected)

    def stopped(self) -> dict[int, str]:
        """Return the ranks that wait at a prompt, and the place of each."""
        return {rank: asks.place or "input()" for rank, asks in sorted(self._asking.items())}

    def switch(self, rank: int) -> None:
        """Give the prompt to a rank that waits."""
        self._current = rank

    def answer(self, ranks: Collection[int]) -> None:
        """Note that these ranks, which waited, have got a line."""
        for rank in ranks:
            del self._asking[rank]
        self._busy = set(ranks)
        self._expected.clear()
        self._together = len(ranks) > 1

    def _tell(self, rank: int, *, marked: bool = False) -> None:
        text = self._said.pop(rank, "")
        if marked:
            text = "".join(f"[{rank}] {line}\n" for line in text.splitlines())
        if text:
            self._show(text)


class StoppedRanks:
    """The ranks of one launch whose debuggers talk with this process.

    ``write`` prints a text; ``ask_who`` asks the agent what all ranks do, for the command ``who``.
    """

    def __init__(self, name: str, write: Callable[[str], None], ask_who: Callable[[], object]) -> None:
        self._name = name
        self._write = write
        self._ask_who = ask_who
        self.channels: dict[int, DebuggersEnd] = {}
        self.prompts = Prompts(lambda text: write(notebook.short_names(text)))

    def hear(self, rank: int) -> bool:
        """Take what a rank has sent; False if it will send nothing more."""
        channel = self.channels[rank]
        try:
            while linux.wait_readable([channel.fileno()], 0.0):
                record, _ = channel.receive()
                self.prompts.take(rank, record)
        except EOFError:
            self.prompts.forget(rank)
            return False
        return True

    def obey(self, line: str | None, rank: int) -> None:
        """Obey a line that was typed at the prompt of a rank. None: no more come."""
        wish = ForRanks((rank,), None) if line is None else parse(line, rank)
        if isinstance(wish, ForRanks):
            self._pass_on(wish)
        elif isinstance(wish, TellWho):
            self._ask_who()
        elif self._have_stopped([wish.rank]):
            self.prompts.switch(wish.rank)

    def tell_who(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Print where each rank is, a line each. ``ranks``: as in the agent's status."""
        stopped = self.prompts.stopped()
        for rank in ranks:
            at = stopped.get(rank["rank"])
            doing = view_of(rank).doing if at is None else f"has stopped at {notebook.short_place(at)}"
            self._write(f"rank {rank['rank']} {doing}\n")

    def close(self) -> None:
        """Close all channels."""
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()

    def _pass_on(self, command: ForRanks) -> None:
        ranks = command.ranks or tuple(self.prompts.stopped())
        if self._have_stopped(ranks):
            self.prompts.answer(ranks)
            for rank in ranks:
                self.channels[rank].try_send(PromptLine(command.line))

    def _have_stopped(self, ranks: Sequence[int]) -> bool:
        """True if these ranks have stopped; otherwise tell the user."""
        stopped = self.prompts.stopped()
        others = [rank for rank in ranks if rank not in stopped]
        if others:
            self._write(f"{name_ranks(others)} of {self._name}: not at a prompt; who shows where each rank is\n")
        return not others


def question() -> bytes:
    """Return the request for what ranks do, that of ``mlaunch why``; for their states if that feature is missing."""
    found = load.at_hand("insight", "wire")
    return STATUS if found is None else bytes(found.WHY)


def view_of(rank: Mapping[str, Any]) -> Any:
    """Return a view of what a rank does, as ``mlaunch why`` shows it; of its state if that feature is missing."""
    try:
        from mlaunch.insight.caller import answers
    except ModuleNotFoundError:
        return SimpleNamespace(rank=rank["rank"], doing=f"is {rank['state']}", operation="")
    return answers.view_of(rank)
