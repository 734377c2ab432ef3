"""What a caller wants to know of the launch on this machine: its agent is asked as ``mlaunch ps`` would."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from mlaunch.engines.wire.member_messages import Look, Reports, Rows, Seen
from mlaunch.protocol import registry
from mlaunch.protocol.board import Board
from mlaunch.protocol.messages import RanksStarting

if TYPE_CHECKING:
    from mlaunch.engines.wire.member_streams import MembersStream


class Looks:
    """Waits for no answer: ``serve`` passes on what has come."""

    def __init__(self, stream: MembersStream, environ: Mapping[str, str]) -> None:
        self._stream = stream
        self._environ = environ
        self._name = ""  # of the launch in the registry
        self._asked: dict[int, tuple[socket.socket, int]] = {}  # with the number of the question

    def fds(self) -> list[int]:
        """Returns what is to be watched."""
        return list(self._asked)

    def learn(self, launch: RanksStarting) -> None:
        """Takes in how the launch is called since the machines have joined."""
        self._name = registry.name_of(launch.launch_id, launch.rank_start)

    def ask(self, order: Look) -> None:
        """Asks the agent; one that does not listen yet is not waited for."""
        # As a visitor would: so an agent has one way to be looked at, and its version may differ.
        connection = registry.connect(self._environ, self._name)
        if connection is None:
            self._stream.send(Seen(order.number))
            return
        self._asked[connection.fileno()] = connection, order.number
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # it ends just now, and ``serve`` finds nothing
            connection.send(order.word)

    def serve(self, ready: Collection[int]) -> None:
        """Passes on the answers that have come."""
        for fd in self._asked.keys() & set(ready):
            connection, number = self._asked.pop(fd)
            found: list[int] = []
            with connection, contextlib.suppress(OSError):  # the agent was killed before it read the question
                _, found, _, _ = socket.recv_fds(connection, 1, 1)
            self._stream.send(Seen(number), found[0] if found else -1)
            for one in found:
                os.close(one)

    def close(self) -> None:
        """Lets go of those that have not come."""
        for connection, _ in self._asked.values():
            connection.close()
        self._asked.clear()


class BoardNews:
    """Knows what was told. ``size``: how many ranks are here."""

    def __init__(self, size: int) -> None:
        self._rows: tuple[bytes, ...] = ()
        self._reported = [0] * size  # by each rank, and told

    def of(self, board: Board) -> Iterator[Rows | Reports]:
        """Yields what is new since the last time."""
        rows = tuple(map(board.row, range(len(self._reported))))
        # A row has 320 bytes; of 64 ranks that have nothing new, five times a second, nothing need travel.
        if rows != self._rows:
            self._rows = rows
            yield Rows(rows)
        found = [board.ring(rank).read(seen) for rank, seen in enumerate(self._reported)]
        self._reported = [count for _, count in found]
        # Ranks report seldom, and a record says nothing of a machine whose ranks have not.
        if any(new for new, _ in found):
            yield Reports(tuple(tuple(new) for new, _ in found))
