"""What ranks say to their agent: answers through a queue, what they are doing through shared memory."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
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

    def writer_fileno(self) -> int:
        return self._writer.fileno()

    def drain(self) -> list[Answer]:
        """Returns what has arrived, without waiting."""
        answers = []
        while not self.empty():
            answers.append(self.get())
        return answers

    def close_reader(self) -> None:
        """Leaves the reading to the one process that does it; called in a writer."""
        self._reader.close()


class Results:
    """Both, for one launch; made by its agent before the ranks are forked."""

    def __init__(self, ranks: int) -> None:
        self.queue = ResultQueue()
        self.board = Board.create(ranks)
