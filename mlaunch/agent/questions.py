"""Questions of an agent to the control threads of its ranks: it waits for answers without holding anything up."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlaunch.base.fds import memory_file
from mlaunch.protocol import payload
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import Ask, ControlHears, ControlSays, ForPart, Operations, Question

if TYPE_CHECKING:
    from mlaunch.rank.in_step import Numbers

Take = Callable[[int, Any], None]  # gets the global rank, and what it has told
_MOST = 16  # questions that one rank owes answers to: a channel that nobody reads is full at about 200


class Questions:
    """Questions that are open, by rank. ``channels``: by global rank, to the control threads."""

    def __init__(self, channels: Mapping[int, Channel[ControlSays, ControlHears]]) -> None:
        self._channels = dict(channels)
        self._open: dict[int, dict[int, tuple[int, Take]]] = {rank: {} for rank in channels}  # by number
        self._owed = dict.fromkeys(channels, 0)  # by rank: answers that have not come, dropped or not
        self._number = 0

    def fds(self) -> list[int]:
        """Return the channels on which answers may come."""
        return [self._channels[rank].fileno() for rank, numbers in self._open.items() if numbers]

    @property
    def open(self) -> set[int]:
        """The numbers of the questions that are not answered."""
        return {number for numbers in self._open.values() for number in numbers}

    def ranks(self) -> list[int]:
        """Return the ranks that can be asked."""
        return list(self._channels)

    def ask(self, rank: int, about: Ask | ForPart, take: Take, call: int = 0) -> int:
        """Ask a rank; return the number of the question. ``take`` is called with the answer, if one comes.

        ``call``: the number of the call that it is about.
        """
        self._number += 1
        # A rank whose C code holds the interpreter lock answers when that returns, or never. Somebody who asks once a
        # second would fill its channel, and the agent would wait to write.
        memfd = memory_file("told") if self._owed[rank] < _MOST else -1
        self._open[rank][self._number] = memfd, take
        if memfd >= 0:
            self._owed[rank] += 1
            self._channels[rank].try_send(Question(self._number, about, call), [memfd])
        return self._number

    def tell(self, rank: int, record: ForPart, fds: Sequence[int] = ()) -> None:
        """Tell a rank something that it does not answer."""
        if rank in self._channels:
            self._channels[rank].try_send(record, fds)

    def drop(self, number: int) -> None:
        """Ignore the answer to a question, should it come."""
        for numbers in self._open.values():
            if number in numbers:
                _close(numbers.pop(number)[0])

    def read(self, ready: Collection[int]) -> None:
        """Take the answers that have come."""
        for rank, channel in list(self._channels.items()):
            if channel.fileno() in ready:
                self._hear(rank, channel)

    def _hear(self, rank: int, channel: Channel[ControlSays, ControlHears]) -> None:
        try:
            record, _ = channel.receive()
        except (EOFError, OSError):  # the rank is gone
            self.forget(rank)
            return
        self._owed[rank] -= 1
        found = self._open[rank].pop(record.number, None)
        if found is not None:
            memfd, take = found
            try:
                told = payload.read(memfd)
            finally:
                os.close(memfd)
            take(rank, told)

    def forget(self, rank: int) -> None:
        """Ask this rank no more: it is gone."""
        self._channels.pop(rank, None)
        for memfd, _ in self._open.pop(rank, {}).values():
            _close(memfd)


def _close(memfd: int) -> None:
    if memfd >= 0:
        os.close(memfd)


class _AskedTogether:
    """Questions that all ranks are asked together."""

    def __init__(self, questions: Questions) -> None:
        self._questions = questions
        self._asked: set[int] = set()  # their numbers

    @property
    def pending(self) -> bool:
        """True while some rank has not answered."""
        return bool(self._asked & self._questions.open)

    def clear(self) -> None:
        """Forget what was asked."""
        for number in self._asked:
            self._questions.drop(number)
        self._asked = set()

    def _ask(self, about: Ask, told: dict[int, Any], call: int = 0) -> None:
        """Ask all; their answers go into ``told``, by global rank."""
        ranks = self._questions.ranks()
        self._asked |= {self._questions.ask(rank, about, told.__setitem__, call) for rank in ranks}


class EnteredRequests(_AskedTogether):
    """How far ranks are: what they have entered in each of their process groups, whatever they wait for.

    Attributes:
        told: By global rank, of those that have answered.
        turns: How often their functions have come by what features count, in their present call.
        places: Their frames, if these were asked for.
        with_places: They were.
    """

    def __init__(self, questions: Questions) -> None:
        super().__init__(questions)
        self.with_places = False
        self.told: dict[int, Operations] = {}
        self.turns: dict[int, int] = {}
        self.places: dict[int, list[tuple[str, str, str]]] = {}

    def ask(self, *, place: bool = False) -> None:
        """Ask all, and forget what was told before. ``place``: also where they are."""
        self.clear()
        self.told, self.turns, self.places = {}, {}, {}
        self.with_places = place
        self._ask(Ask.ENTERED, self.told)
        self._ask(Ask.TURNS, self.turns)
        if place:
            self._ask(Ask.PLACE, self.places)


class NumberRequests(_AskedTogether):
    """The question which operations ranks have entered. It reaches ranks that are inside one, unlike a call.

    Attributes:
        told: By global rank, of those that have answered.
    """

    def __init__(self, questions: Questions) -> None:
        super().__init__(questions)
        self.told: dict[int, Numbers] = {}

    def ask(self, call: int) -> None:
        """Ask all."""
        self.clear()
        self._ask(Ask.NUMBERS, self.told, call)

    def clear(self) -> None:
        """Forget what was asked and told."""
        super().clear()
        self.told = {}
