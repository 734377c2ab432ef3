"""Asks ranks that stay which operations they have entered while they may be inside one, where no call reaches them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from mlaunch.protocol import payload
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages.kept_messages import TellNumbers
from mlaunch.rank.in_step import Numbers


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

    @property
    def told(self) -> Mapping[int, Numbers]:
        """What has been told, by global rank."""
        return self._told

    def clear(self) -> None:
        """Forgets what was asked and told."""
        for memfd in self._memfds.values():
            os.close(memfd)
        self._memfds, self._told = {}, {}
