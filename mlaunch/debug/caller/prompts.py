"""The prompt: which stopped rank has it, and what other ranks have said meanwhile.

    running --asks--> waiting for its turn --> at the prompt --a line--> running

A rank that takes a step keeps the prompt for a moment, in which it mostly comes back. Several ranks that have been
given the same command are heard in the order of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from mlaunch.debug.wire import Onward, PromptAsks, PromptLeft, PromptSays
from mlaunch.protocol.channel import assert_never

if TYPE_CHECKING:
    from mlaunch.debug.wire import PromptTells

_PATIENCE = 1.0  # seconds for ranks that take a step


class Prompts:
    """Knows them by rank. ``show`` writes a text for the user; ``clock`` gives monotonic seconds."""

    def __init__(self, show: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._show = show
        self._clock = clock
        self._asking: dict[int, PromptAsks] = {}  # in the order of their coming
        self._said: dict[int, str] = {}  # what is not shown yet
        self._busy: set[int] = set()  # with a command, at the prompt
        self._expected: set[int] = set()  # back from a step
        self._together = False  # that command went to several
        self._until = 0.0  # these are waited for
        self._current: int | None = None
        self._fails = False  # a rank does, and the launch is about to end
        self.quit: tuple[int, str] | None = None  # the rank whose prompt has ended the launch, and where that was

    def take(self, rank: int, record: PromptTells) -> None:
        """Takes in what a rank says."""
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
        """Takes in that a rank is gone; what it has said last is shown."""
        self._tell(rank)
        self._asking.pop(rank, None)
        self._busy.discard(rank)
        self._expected.discard(rank)

    def timeout(self) -> float | None:
        """Returns the seconds until ``next`` has another answer though nothing comes; None: it has not."""
        waits = self._expected and self._asking and not self._busy and not self._fails
        return max(0.0, self._until - self._clock()) if waits else None

    def next(self) -> tuple[int, str] | None:
        """Returns the rank that is to be asked, and its prompt; None: none is, now. Shows what it has said."""
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
        """Whether a user debugs: a rank has stopped, obeys a command, or is expected back from a step."""
        return bool(self._asking or self._busy or self._expected)

    def stopped(self) -> dict[int, str]:
        """Returns the ranks that wait at a prompt, and where each is."""
        return {rank: asks.place or "input()" for rank, asks in sorted(self._asking.items())}

    def switch(self, rank: int) -> None:
        """Gives a rank that waits the prompt."""
        self._current = rank

    def answer(self, ranks: Collection[int]) -> None:
        """Takes in that these ranks, which waited, have been given a line."""
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
