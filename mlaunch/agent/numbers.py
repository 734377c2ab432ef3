"""Asks ranks that stay which operations they have entered while they may be inside one, where no call reaches them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from mlaunch.protocol import payload
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.kept_messages import TellNumbers
from mlaunch.rank.step import Numbers


class NumberRequests:
    """What ranks tell of the present call; a thread of each answers, if the rank lets it run."""

    def __init__(self, channels: Mapping[int, Channel]) -> None:
        """``channels``: by global rank, to the ranks' threads."""
        self._channels = {channel.fileno(): (rank, channel) for rank, channel in channels.items()}
        self._memfds: dict[int, int] = {}  # by file descriptor of the channel: where the answer comes
        self._told: dict[int, Numbers] = {}  # by global rank
        self._question = 0  # its number: an answer to an older one comes too late

    @property
    def pending(self) -> bool:
        """Whether somebody has not answered."""
        return bool(self._memfds)

    def fds(self) -> list[int]:
        return list(self._memfds)

    def ask(self, call: int) -> None:
        """Asks all ranks."""
        self.clear()
        self._question += 1
        for fd, (_, channel) in self._channels.items():
            self._memfds[fd] = payload.create("numbers")
            channel.try_send(TellNumbers(call, self._question), [self._memfds[fd]])

    def read(self, ready: Collection[int]) -> None:
        """Takes in answers."""
        for fd in self._memfds.keys() & set(ready):
            rank, channel = self._channels[fd]
            try:
                record, _ = channel.receive()
            except (EOFError, OSError):  # the rank is gone
                os.close(self._memfds.pop(fd))
                continue
            if record.question == self._question:
                memfd = self._memfds.pop(fd)
                self._told[rank] = payload.read(memfd)
                os.close(memfd)

    def out_of_step(self, back: Collection[int]) -> bool:
        """Tells whether a rank has entered an operation that one which is ``back`` from the call never will."""
        return any(
            self._is_behind(name, number, rank, other)
            for rank in self._told.keys() & set(back)
            for other, numbers in self._told.items()
            for name, (members, number) in numbers.items()
            if rank in members
        )

    def _is_behind(self, name: str, number: int | None, rank: int, other: int) -> bool:
        """Tells whether ``rank`` has come less far in a group than ``other``, which is at ``number``."""
        if rank == other or number is None:
            return False
        _, reached = self._told[rank].get(name, ((), 0))
        return reached is not None and reached < number

    def clear(self) -> None:
        """Forgets what was asked and told."""
        for memfd in self._memfds.values():
            os.close(memfd)
        self._memfds, self._told = {}, {}
