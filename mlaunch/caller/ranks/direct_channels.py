"""The ways by which a launcher calls ranks that stay, and hears small values of them, without waking their agent."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from mlaunch.base.fds import KeptFd
from mlaunch.protocol.board import Board
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import DirectAnswer, RankHears, RankSays
from mlaunch.protocol.payload import Payload
from mlaunch.protocol.result_queue import ResultQueue
from mlaunch.protocol.server_messages import DirectFds


def _is_nothing() -> bool:
    return True


class DirectWays:
    """The channels to ranks that are called past their agent. Filled while ranks start: one channel per rank."""

    def __init__(self) -> None:
        self._ranks: dict[int, Channel[RankSays, RankHears]] = {}
        self._answers: ResultQueue[DirectAnswer] | None = None
        self._kept: tuple[KeptFd, ...] = ()  # what answers come on, and ``fd``
        self._is_watched = _is_nothing
        self.fd = -1  # can be read when all have answered; -1: none can

    def __len__(self) -> int:
        """Returns how many ranks can be reached directly."""
        return len(self._ranks)

    def take_answers(self, offered: DirectFds, is_watched: Callable[[], bool]) -> None:
        """Takes what answers come by; ``is_watched``: what tells that all are there is still the same."""
        self._is_watched = is_watched
        self.fd, self._answers = offered.all_there, ResultQueue(Connection(offered.answers, writable=False))
        self._kept = KeptFd(offered.answers), KeptFd(offered.all_there)

    def intact(self) -> bool:
        """Tells whether the descriptors are still these ways': others may have closed them and opened files."""
        if not self._is_watched():
            self._kept[1].forget()
        return all(one.intact() for one in self._kept) and all(way.intact() for way in self._ranks.values())

    def take_rank(self, rank: int, fd: int) -> None:
        """Takes the end on which a rank hears."""
        self._ranks[rank] = Channel.adopt(fd)

    def send(self, board: Board, number: int, content: Payload) -> None:
        """Sends all ranks a call. One that is gone hears nothing, which its agent will tell."""
        # Before the call is sent: the agent, which wakes if a rank dies of it, must know which call it was.
        board.call = number
        # A plain tuple: pickle would look the class of a record up in each rank. Pickled once for all ranks.
        record, fds = pickle.dumps((number, content.data)), content.fds()
        for way in self._ranks.values():
            way.try_send_pickled(record, fds)

    def drain(self) -> Sequence[DirectAnswer]:
        """Returns the answers that have come. EOFError: the ranks are gone, and their agent."""
        if self._answers is None or not all(one.intact() for one in self._kept):
            return ()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        return self._answers.drain()

    def close_answers(self) -> None:
        """Closes the end on which answers came."""
        if self._answers is not None:
            self._answers.leave_reader()
        for one in self._kept:
            one.close()
        self.fd, self._answers, self._kept, self._is_watched = -1, None, (), _is_nothing

    def close(self) -> None:
        self.close_answers()
        for way in self._ranks.values():
            way.close()
