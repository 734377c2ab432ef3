"""The ways from ranks to their agent and launcher: answers through queues, progress through shared memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import select
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue
from typing import TypeVar

from mlaunch.protocol.board import Board
from mlaunch.protocol.messages import Answer, DirectAnswer

R = TypeVar("R")

ANSWER_LIMIT = 2048  # bytes of a value inside an answer; a memory file for each would cost more than a short call
_LENGTH = struct.Struct("!i")  # as in multiprocessing's connections
_LENGTH_SIZE, _length = _LENGTH.size, _LENGTH.unpack_from
_CHUNK = 65536  # bytes: a pipe holds no more


class ResultQueue(SimpleQueue[R]):
    """A multiprocessing queue of answers that a rank cannot damage if it is killed while it sends.

    An answer is one write of far less than PIPE_BUF bytes, which the kernel takes whole or not at all. So writers need
    no lock, and there is none that a rank could die with.
    """

    _reader: Connection
    _writer: Connection
    _rlock: contextlib.nullcontext[None]
    _wlock: None
    _poll: Callable[[], bool]

    def __init__(self, reader: Connection | None = None) -> None:  # not the parent's: its locks are in /dev/shm
        """Read from ``reader``, the end of another process's queue; None: make a queue."""
        if reader is None:
            self._reader, self._writer = multiprocessing.Pipe(duplex=False)
            self.writer_fd = self._writer.fileno()
        else:
            self._reader = reader
        self._rest = b""  # the beginning of an answer that was read in part
        self._reader_fd = self._reader.fileno()
        self._waiting = select.poll()
        self._waiting.register(self._reader_fd, select.POLLIN)
        self._rlock = contextlib.nullcontext()  # only one process reads
        self._wlock = None
        self._poll = self._reader.poll

    def fileno(self) -> int:
        return self._reader.fileno()

    def put(self, obj: R) -> None:
        """Send an answer, pickled as it is: it holds nothing that needs multiprocessing's own ways of pickling."""
        data = pickle.dumps(obj)
        # One write, below PIPE_BUF: the kernel takes it whole, so a rank that is killed while it sends leaves no half.
        os.write(self.writer_fd, _LENGTH.pack(len(data)) + data)

    def drain(self) -> list[R]:
        """Return what has arrived, without waiting. EOFError if nothing more can arrive, since all writers are gone."""
        answers: list[R] = []
        read = _CHUNK
        while read == _CHUNK and self._waiting.poll(0):
            data = os.read(self._reader_fd, _CHUNK)
            if not data and not answers:
                raise EOFError
            read = len(data)
            data, at = self._rest + data, 0
            while (begin := at + _LENGTH_SIZE) <= len(data):
                end = begin + _length(data, at)[0]
                if end > len(data):
                    break
                answers.append(pickle.loads(data[begin:end]))
                at = end
            self._rest = data[at:]
        return answers

    def close_reader(self) -> None:
        """Close the reading end; called in a writer, because only one process reads."""
        self._reader.close()

    def leave_reader(self) -> None:
        """Give up the reading end without closing it, because its giver closes it."""
        self._reader._handle = None  # type: ignore[attr-defined]

    def close(self) -> None:
        """Close both ends, in the process that made the queue."""
        self._reader.close()
        self._writer.close()


class Results:
    """The queues and the board of one launch; made by its agent before the ranks are forked.

    ``stay``: the ranks stay between calls. Then there is a second queue, from which their launcher reads, so that short
    calls need not wake the agent.
    """

    def __init__(self, ranks: int, *, stay: bool = False) -> None:
        self.queue: ResultQueue[Answer] = ResultQueue()
        self.to_launcher: ResultQueue[DirectAnswer] | None = ResultQueue() if stay else None
        self.board = Board.create(ranks)
        self._all_there = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if stay else -1

    def ways(self) -> list[int]:
        """Return the descriptors on which a rank answers."""
        launchers = [] if self.to_launcher is None else [self.to_launcher.writer_fd, self._all_there]
        return [self.queue.writer_fd, *launchers]

    def answer(self, answer: Answer, *, direct: bool) -> None:
        """Send the agent an answer; ``direct``: to a call that the launcher itself has sent."""
        if direct and self.to_launcher is not None:
            self.board.note_done(answer.local_rank, answer.number)
        self.queue.put(answer)
        if direct and self.to_launcher is not None:
            self._wake_launcher(answer.number)

    def answer_launcher(self, answer: DirectAnswer) -> None:
        """Send the launcher a small value, for a call that it has sent."""
        if self.to_launcher is not None:
            rank, number, _, _ = answer
            # Before it is sent: the agent, which sleeps meanwhile, must never find an answer that is not noted.
            self.board.note_value(rank, number)
            self.to_launcher.put(answer)
            self._wake_launcher(number)

    def _wake_launcher(self, number: int) -> None:
        """Wake the launcher once, when all ranks have answered: the last rank does it, however it answers."""
        if self.board.all_done(number):
            os.eventfd_write(self._all_there, 1)

    def offered(self) -> list[int]:
        """Return the descriptors that the launcher gets: ``BoardFds``."""
        return [self.board.fd, *([self.to_launcher.fileno(), self._all_there] if self.to_launcher is not None else [])]

    def close_offered(self) -> None:
        """Close the reading end that only the launcher uses."""
        if self.to_launcher is not None:
            self.to_launcher.close_reader()

    def close(self) -> None:
        """Close the queue and the board of ranks that do not stay."""
        self.queue.close()
        self.board.close()
