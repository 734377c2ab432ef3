"""What ranks say to their agent: answers through a queue, what they are doing through shared memory."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection, wait
from multiprocessing.queues import SimpleQueue

from mlaunch.protocol.board import Board
from mlaunch.protocol.messages import Answer


class ResultQueue(SimpleQueue[Answer]):
    """A multiprocessing queue of answers that a rank killed in the middle of sending cannot harm.

    An answer is one write of far less than PIPE_BUF bytes, which the kernel takes whole or not at all. So no lock is
    needed between writers, and there is none that a rank could die with.
    """

    _reader: Connection
    _writer: Connection

    def __init__(self) -> None:
        super().__init__(ctx=multiprocessing.get_context("fork"))
        self._wlock = None

    def fileno(self) -> int:
        return self._reader.fileno()

    def drain(self) -> list[Answer]:
        """What has arrived, without waiting."""
        answers = []
        while not self.empty():
            answers.append(self.get())
        return answers

    def close_reader(self) -> None:
        """In a writer: leaves the reading to the one process that does it."""
        self._reader.close()


class Answers:
    """Both, for one launch; made by its agent before the ranks are forked."""

    def __init__(self, ranks: int) -> None:
        self.queue = ResultQueue()
        self.board = Board(ranks)
        self._dismissed, self._dismissal = multiprocessing.Pipe(duplex=False)
        self._said = False

    def dismiss(self) -> None:
        """In the agent: ranks that have answered may end."""
        if not self._said:
            self._said = True
            self._dismissal.send_bytes(b"")

    def await_dismissal(self) -> None:
        """In a rank that has answered, whose end would break what the others are in: a collective, a new group.

        Until all have answered, or the agent has seen where they are, there would only be "Connection closed by peer".
        """
        wait([self._dismissed])  # nobody takes the word out, so it is there for all
