"""What an agent asks the control threads of its ranks, and waits for without holding anything up."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from mlaunch.base.fds import memory_file
from mlaunch.protocol import payload
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import Ask, ControlHears, ControlSays, ForPart, Question

Take = Callable[[int, Any], None]  # gets the global rank, and what it has told
_MOST = 16  # questions that one rank owes answers to: a channel that nobody reads is full at some 200


class Questions:
    """Questions that are open, by rank. ``channels``: by global rank, to the control threads."""

    def __init__(self, channels: Mapping[int, Channel[ControlSays, ControlHears]]) -> None:
        self._channels = dict(channels)
        self._open: dict[int, dict[int, tuple[int, Take]]] = {rank: {} for rank in channels}  # by number
        self._owed = dict.fromkeys(channels, 0)  # by rank: answers that have not come, dropped or not
        self._number = 0

    def fds(self) -> list[int]:
        """Returns what is to be watched."""
        return [self._channels[rank].fileno() for rank, numbers in self._open.items() if numbers]

    @property
    def open(self) -> set[int]:
        """The numbers of the questions that are not answered."""
        return {number for numbers in self._open.values() for number in numbers}

    def ranks(self) -> list[int]:
        """Returns the ranks that can be asked."""
        return list(self._channels)

    def ask(self, rank: int, about: Ask | ForPart, take: Take, call: int = 0) -> int:
        """Ask a rank; return the number of the question. ``take`` is called with the answer, if one comes.

        ``call``: the number of the call that it is about.
        """
        self._number += 1
        # Sent, and not waited for: a rank whose C code holds the interpreter lock answers when that returns, or
        # never. Who looks once a second would fill the channel of such a rank, and the agent would wait for it.
        memfd = memory_file("told") if self._owed[rank] < _MOST else -1
        self._open[rank][self._number] = memfd, take
        if memfd >= 0:
            self._owed[rank] += 1
            self._channels[rank].try_send(Question(self._number, about, call), [memfd])
        return self._number

    def tell(self, rank: int, record: ForPart, fds: Sequence[int] = ()) -> None:
        """Tells a rank something that it does not answer."""
        if rank in self._channels:
            self._channels[rank].try_send(record, fds)

    def drop(self, number: int) -> None:
        """Waits no more for the answer to a question: it will be ignored."""
        for numbers in self._open.values():
            if number in numbers:
                _close(numbers.pop(number)[0])

    def read(self, ready: Collection[int]) -> None:
        """Takes in answers."""
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
        """Asks this rank no more, which is gone."""
        self._channels.pop(rank, None)
        for memfd, _ in self._open.pop(rank, {}).values():
            _close(memfd)


def _close(memfd: int) -> None:
    if memfd >= 0:
        os.close(memfd)
