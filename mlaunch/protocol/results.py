"""What ranks say to their agent: answers through a queue, what they are doing through shared memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue

from mlaunch.base import linux
from mlaunch.protocol.board import Board
from mlaunch.protocol.messages import Answer

ANSWER_LIMIT = 2048  # bytes of a value inside an answer


class ResultQueue(SimpleQueue[Answer]):
    """A multiprocessing queue of answers that a rank killed in the middle of sending cannot harm.

    An answer is one write of far less than PIPE_BUF bytes, which the kernel takes whole or not at all. So no lock is
    needed between writers, and there is none that a rank could die with.
    """

    _reader: Connection
    _writer: Connection
    _rlock: contextlib.nullcontext[None]
    _wlock: None
    _poll: Callable[[], bool]

    def __init__(self, reader: Connection | None = None) -> None:  # not the parent's: its locks are in /dev/shm
        """``reader``: the end of another process's queue, from which this one is to read; None: make a queue."""
        if reader is None:
            self._reader, self._writer = multiprocessing.Pipe(duplex=False)
        else:
            self._reader = reader
        self._rlock = contextlib.nullcontext()  # one process reads
        self._wlock = None
        self._poll = self._reader.poll

    def fileno(self) -> int:
        return self._reader.fileno()

    def writer_fileno(self) -> int:
        return self._writer.fileno()

    def put(self, obj: Answer) -> None:
        """Sends an answer, pickled as it is: it holds nothing that multiprocessing pickles in ways of its own."""
        self._writer.send_bytes(pickle.dumps(obj))

    def drain(self) -> list[Answer]:
        """Returns what has arrived, without waiting. EOFError: nothing will, since all writers are gone."""
        answers: list[Answer] = []
        while linux.wait_readable([self.fileno()], 0.0):
            try:
                answers.append(self.get())
            except EOFError:
                if not answers:
                    raise
                break
        return answers

    def close_reader(self) -> None:
        """Leaves the reading to the one process that does it; called in a writer."""
        self._reader.close()


class Results:
    """Both, for one launch; made by its agent before the ranks are forked.

    ``stay``: the ranks do. Then there is a second queue, from which their launcher reads: short calls, one after the
    other, need not wake the agent.
    """

    def __init__(self, ranks: int, *, stay: bool = False) -> None:
        self.queue = ResultQueue()
        self.to_launcher = ResultQueue() if stay else None
        self.board = Board.create(ranks)

    def offered(self) -> list[int]:
        """Returns what the launcher gets: the board, and the end from which it reads, if there is one."""
        return [self.board.fd, *([self.to_launcher.fileno()] if self.to_launcher is not None else [])]

    def close_offered(self) -> None:
        """Leaves that end to the launcher."""
        if self.to_launcher is not None:
            self.to_launcher.close_reader()
