"""What ranks say to their agent: answers through a queue, their phase through shared memory."""

from __future__ import annotations

import mmap
import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue

from mlaunch.runtime.messages import Answer, Phase


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


class Phases:
    """The phase of every rank of this machine, in memory that they share with their agent.

    It tells what a rank was doing that died without a word.
    """

    _ORDER = tuple(Phase)

    def __init__(self, ranks: int) -> None:
        self._shared = mmap.mmap(-1, ranks)

    def __setitem__(self, local_rank: int, phase: Phase) -> None:
        self._shared[local_rank] = self._ORDER.index(phase)

    def __getitem__(self, local_rank: int) -> Phase:
        return self._ORDER[self._shared[local_rank]]


class Answers:
    """Both, for one launch; made by its agent before the ranks are forked."""

    def __init__(self, ranks: int) -> None:
        self.queue = ResultQueue()
        self.phases = Phases(ranks)
