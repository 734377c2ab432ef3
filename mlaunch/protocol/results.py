"""What ranks say to their agent and launcher: answers through queues, what they are doing through shared memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import select
import struct
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue

from mlaunch.protocol.board import Board
from mlaunch.protocol.messages import Answer

ANSWER_LIMIT = 2048  # bytes of a value inside an answer
_LENGTH = struct.Struct("!i")  # as multiprocessing's connections have it
_CHUNK = 65536  # bytes: a pipe holds no more


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
        self._rest = b""  # of what was read: the beginning of an answer
        self._waiting = select.poll()
        self._waiting.register(self._reader.fileno(), select.POLLIN)
        self._rlock = contextlib.nullcontext()  # one process reads
        self._wlock = None
        self._poll = self._reader.poll

    def fileno(self) -> int:
        return self._reader.fileno()

    def writer_fileno(self) -> int:
        return self._writer.fileno()

    def put(self, obj: Answer) -> None:
        """Sends an answer, pickled as it is: it holds nothing that multiprocessing pickles in ways of its own."""
        data = pickle.dumps(obj)
        os.write(self._writer.fileno(), _LENGTH.pack(len(data)) + data)

    def drain(self) -> list[Answer]:
        """Returns what has arrived, without waiting. EOFError: nothing will, since all writers are gone."""
        answers: list[Answer] = []
        read = _CHUNK
        while read == _CHUNK and self._waiting.poll(0):
            data = os.read(self._reader.fileno(), _CHUNK)
            if not data and not answers:
                raise EOFError
            read = len(data)
            self._rest += data
            answers += self._take()
        return answers

    def _take(self) -> Iterator[Answer]:
        """Yields the answers that have come whole."""
        at = 0
        while at + _LENGTH.size <= len(self._rest):
            (size,) = _LENGTH.unpack_from(self._rest, at)
            end = at + _LENGTH.size + size
            if end > len(self._rest):
                break
            yield pickle.loads(memoryview(self._rest)[at + _LENGTH.size : end])
            at = end
        self._rest = self._rest[at:]

    def close_reader(self) -> None:
        """Leaves the reading to the one process that does it; called in a writer."""
        self._reader.close()


class Results:
    """The queues and the board of one launch; made by its agent before the ranks are forked.

    ``stay``: the ranks do. Then there is a second queue, from which their launcher reads, so that short calls need not
    wake the agent.
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
