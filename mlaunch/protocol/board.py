"""Memory that the ranks, agent and launcher of one machine share: each rank's phase, progress and reports.

A rank writes its own row and nobody else does, so there is no lock. The exceptions: the agent writes one field of the
row, which the rank only reads, and the launcher writes the head. The board shows what a rank was doing if it dies
without a message, and costs the rank nothing to keep.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence

from mlaunch.base.fds import KeptFd, fix_size, memory_file
from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.messages import Phase

_HEAD = 64  # bytes before the first row
_CALL = struct.Struct("=I")
_APART_AT = 4
_NAME_AT = 8
_NAME_LIMIT = _HEAD - _NAME_AT  # bytes
_STAMP = struct.Struct("=qqd")  # start, end, when
# A reader that is more than this many writes behind gets them in the order of their arrival, as without stamps.
_STAMPS = 256  # of the latest writes
_COUNT = struct.Struct("=q")
_STREAM = _COUNT.size + _STAMPS * _STAMP.size
_IMPORT_AT = 256
_IMPORT_LIMIT = 64  # bytes
_PLACE_AT = _IMPORT_AT + _IMPORT_LIMIT
_PLACE_LIMIT = 128  # bytes
_STAMPS_AT = _PLACE_AT + _PLACE_LIMIT
_ROW = _STAMPS_AT + 2 * _STREAM  # bytes
_PHASES = tuple(Phase)
REPORTS_KEPT = 256
REPORT_LIMIT = 500  # bytes of an entry
_RING_HEAD = struct.Struct("=Q")  # how many were written
_ENTRY_NUMBER = struct.Struct("=Q")
_ENTRY_LENGTH = struct.Struct("=H")
_ENTRY = 512
_RING = _RING_HEAD.size + REPORTS_KEPT * _ENTRY  # bytes; a ring that nobody writes to takes no memory
_OF_RANK = _ROW + _CALL.size + _RING
_TIMES = struct.Struct(f"={len(_PHASES)}d")  # when each phase began, in monotonic seconds; 0: not yet
_TIMES_AT = 8
_TIME = struct.Struct("=d")
_ANSWERED = struct.Struct("=I")
_ANSWERED_AT = _TIMES_AT + _TIMES.size
_STOP = struct.Struct("=I")
_STOP_AT = 4
_LOOP = struct.Struct("=QqdqdH")  # number, done, time of the latter, total, start, length of the description
_DONE = struct.Struct("=qd")
_DONE_AT = 8
_LOOP_AT = 128
_TEXT_AT = _LOOP_AT + _LOOP.size
_TEXT_LIMIT = _IMPORT_AT - _TEXT_AT


@frozen_record
class Loop:
    """The progress of a rank in its latest ``mlaunch.progress``.

    ``number``: 0 if there was none. ``total``: -1 if unknown. ``start`` and ``at``, the time at which it reached
    ``done``, are in monotonic seconds.
    """

    number: int
    done: int
    at: float
    total: int
    start: float
    description: str


class Board:
    """The phases of the ranks: ``board[local_rank]`` is a rank's phase."""

    def __init__(self, fd: int) -> None:
        """Take over the descriptor of a board."""
        self.fd = fd
        self._kept = KeptFd(fd)
        self._memory = mmap.mmap(fd, 0)
        self._ranks = (len(self._memory) - _HEAD) // _OF_RANK
        self._done_at = _HEAD + self._ranks * _ROW
        self._rings_at = self._done_at + self._ranks * _CALL.size

    @classmethod
    def create(cls, ranks: int) -> Board:
        """Create a board."""
        fd = memory_file("board")
        os.ftruncate(fd, _HEAD + ranks * _OF_RANK)
        fix_size(fd)
        return cls(fd)

    def phase_writer(self, local_rank: int) -> Callable[[Phase], None]:
        """Return the function by which a rank notes that it enters a phase, and when."""
        # One function with all that it needs at hand: a short call enters four phases.
        memory, row, index_of = self._memory, _row(local_rank), _PHASES.index
        pack_time, times_at, time_size, now = _TIME.pack_into, row + _TIMES_AT, _TIME.size, time.monotonic

        def enter(phase: Phase) -> None:
            index = index_of(phase)
            # The time before the phase: a reader in between finds the old phase, not a new one without its time.
            pack_time(memory, times_at + time_size * index, now())
            memory[row] = index

        return enter

    def __getitem__(self, local_rank: int) -> Phase:
        return _PHASES[self._memory[_row(local_rank)]]

    @property
    def call(self) -> int:
        """Return the number of the latest call that the launcher itself has sent to ranks that stay; 0 if none."""
        number: int = _CALL.unpack_from(self._memory)[0]
        return number

    @call.setter
    def call(self, number: int) -> None:
        _CALL.pack_into(self._memory, 0, number)

    @property
    def name(self) -> str:
        """Return the name of the latest call that the launcher has sent to ranks that stay; "" before the first."""
        text, _, _ = self._memory[_NAME_AT:_HEAD].partition(b"\0")
        return text.decode(errors="ignore")

    @name.setter
    def name(self, name: str) -> None:
        self._memory[_NAME_AT:_HEAD] = name.encode(errors="replace")[:_NAME_LIMIT].ljust(_NAME_LIMIT, b"\0")

    @property
    def apart(self) -> int:
        """Return the number of the latest call after which a rank here was in no process group; 0 if none.

        Ranks write it before they answer, so all of them find the same number when the next call begins. If a faster
        rank has already written the number of that next call, the calls before it left every rank in its group.
        """
        number: int = _CALL.unpack_from(self._memory, _APART_AT)[0]
        return number

    @apart.setter
    def apart(self, number: int) -> None:
        _CALL.pack_into(self._memory, _APART_AT, number)

    def note_import(self, local_rank: int, name: str) -> None:
        """Note which module the rank is importing; "" for none."""
        start = _row(local_rank) + _IMPORT_AT
        self._memory[start : start + _IMPORT_LIMIT] = name.encode()[:_IMPORT_LIMIT].ljust(_IMPORT_LIMIT, b"\0")

    def note_imported(self, local_rank: int, package: str, seconds: float) -> None:
        """Note, after the last import, which package took the rank's call the longest to import."""
        self.note_import(local_rank, f"{package[: _IMPORT_LIMIT - 16]}={seconds:.1f}")

    def importing(self, local_rank: int) -> str:
        """Return the module that the rank is importing; "" if none."""
        text = self._import_text(local_rank)
        return "" if "=" in text else text

    def imported(self, local_rank: int) -> tuple[str, str]:
        """Return the package that took the rank's call longest to import, and seconds; both "" if none was slow."""
        package, _, seconds = self._import_text(local_rank).partition("=")
        return (package, seconds) if seconds else ("", "")

    def _import_text(self, local_rank: int) -> str:
        start = _row(local_rank) + _IMPORT_AT
        return self._memory[start : start + _IMPORT_LIMIT].partition(b"\0")[0].decode(errors="replace")

    def note_place(self, local_rank: int, text: str) -> None:
        """Note where a feature has placed the rank, as text for people."""
        start = _row(local_rank) + _PLACE_AT
        self._memory[start : start + _PLACE_LIMIT] = text.encode()[:_PLACE_LIMIT].ljust(_PLACE_LIMIT, b"\0")

    def place(self, local_rank: int) -> str:
        """Return where a feature has placed the rank; "" if nowhere."""
        start = _row(local_rank) + _PLACE_AT
        return self._memory[start : start + _PLACE_LIMIT].partition(b"\0")[0].decode(errors="replace")

    def note_value(self, local_rank: int, number: int) -> None:
        """Note that the rank is about to send the launcher a value for this call, which is its answer."""
        self.note_done(local_rank, number)
        _ANSWERED.pack_into(self._memory, _HEAD + local_rank * _ROW + _ANSWERED_AT, number)

    def answered(self, local_rank: int) -> int:
        """Return the number of the latest call for which the rank has noted an answer to the launcher; 0 if none."""
        number: int = _ANSWERED.unpack_from(self._memory, _row(local_rank) + _ANSWERED_AT)[0]
        return number

    def note_done(self, local_rank: int, number: int) -> None:
        """Note that the rank is about to send its answer to this call, to the launcher or to the agent."""
        _CALL.pack_into(self._memory, self._done_at + local_rank * _CALL.size, number)

    def all_done(self, number: int) -> bool:
        """True once every rank has noted this call.

        At least one of the ranks that ask after ``note_done`` gets True: each makes a system call between its note and
        its question, which orders their writes.
        """
        return self._memory[self._done_at : self._rings_at] == _CALL.pack(number) * self._ranks

    def stop(self, local_rank: int, number: int) -> None:
        """Note that the rank must end this call if it has not begun it yet. Only the agent writes this."""
        _STOP.pack_into(self._memory, _row(local_rank) + _STOP_AT, number)

    def stopped(self, local_rank: int) -> int:
        """Return the number of the latest call that the rank must end; 0 if none."""
        number: int = _STOP.unpack_from(self._memory, _HEAD + local_rank * _ROW + _STOP_AT)[0]
        return number

    def times(self, local_rank: int) -> tuple[float, ...]:
        """Return when each phase began, for ``in_order``."""
        return _TIMES.unpack_from(self._memory, _row(local_rank) + _TIMES_AT)

    def all_times(self) -> list[bytes]:
        """Return the times of all ranks, in order, for ``read_times``."""
        starts = range(_HEAD + _TIMES_AT, self._done_at, _ROW)
        return [self._memory[start : start + _TIMES.size] for start in starts]

    def row(self, local_rank: int) -> bytes:
        """Return the part of a rank's row that describes what it does, for a board on another machine."""
        start = _row(local_rank)
        return self._memory[start : start + _STAMPS_AT]

    def take_row(self, local_rank: int, row: bytes, shift: float) -> None:
        """Copy a row from a board on another machine, whose clock is ``shift`` seconds behind."""
        times = [at and at + shift for at in _TIMES.unpack_from(row, _TIMES_AT)]
        number, done, at, total, start, length = _LOOP.unpack_from(row, _LOOP_AT)
        shifted = bytearray(row)
        _TIMES.pack_into(shifted, _TIMES_AT, *times)
        _LOOP.pack_into(shifted, _LOOP_AT, number, done, at + shift, total, start + shift, length)
        self._memory[_row(local_rank) : _row(local_rank) + len(shifted)] = bytes(shifted)

    def begin_loop(self, local_rank: int, total: int, description: str) -> None:
        row = _row(local_rank)
        text = description.encode()[:_TEXT_LIMIT]
        self._memory[row + _TEXT_AT : row + _TEXT_AT + len(text)] = text
        number, now = self.loop(local_rank).number + 1, time.monotonic()
        _LOOP.pack_into(self._memory, row + _LOOP_AT, number, 0, now, total, now, len(text))

    def count(self, local_rank: int, done: int) -> None:
        _DONE.pack_into(self._memory, _row(local_rank) + _LOOP_AT + _DONE_AT, done, time.monotonic())

    def loop(self, local_rank: int) -> Loop:
        row = _row(local_rank)
        number, done, at, total, start, length = _LOOP.unpack_from(self._memory, row + _LOOP_AT)
        text = self._memory[row + _TEXT_AT : row + _TEXT_AT + length]
        return Loop(number, done, at, total, start, text.decode(errors="replace"))

    def stamp(self, local_rank: int, stream: int, start: int, end: int) -> None:
        """Note that a rank is about to print bytes ``start`` to ``end`` of a stream. ``stream``: 1 or 2."""
        base = _row(local_rank) + _STAMPS_AT + (stream - 1) * _STREAM
        (count,) = _COUNT.unpack_from(self._memory, base)
        place = base + _COUNT.size + count % _STAMPS * _STAMP.size
        _STAMP.pack_into(self._memory, place, start, end, time.monotonic())
        _COUNT.pack_into(self._memory, base, count + 1)

    def stamps(self, local_rank: int, stream: int) -> Iterator[tuple[int, int, float]]:
        """Yield (start, end, when) of the latest noted writes, the latest first."""
        base = _row(local_rank) + _STAMPS_AT + (stream - 1) * _STREAM
        (count,) = _COUNT.unpack_from(self._memory, base)
        for index in range(count - 1, max(count - _STAMPS, 0) - 1, -1):
            yield _STAMP.unpack_from(self._memory, base + _COUNT.size + index % _STAMPS * _STAMP.size)

    def ring(self, local_rank: int) -> ReportRing:
        """Return the ring with a rank's reports."""
        return ReportRing(self._memory, self._rings_at + local_rank * _RING)

    def close(self) -> None:
        self._memory.close()
        self._kept.close()


class ReportRing:
    """The reports of a rank (``mlaunch.report``): a ring in shared memory, so that nobody waits for its reader.

    Only the rank writes. A reader that is too slow misses the oldest entries, and knows how many. Each entry has a
    number. It is written last, and is void while the entry is being written.
    """

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._memory, self._start = memory, start

    def add(self, data: bytes) -> None:
        """Add an entry of ``REPORT_LIMIT`` bytes at most."""
        count = self.count()
        place = self._place(count)
        # Void while it is written: a reader that finds another number than it expects leaves the entry out.
        _ENTRY_NUMBER.pack_into(self._memory, place, 0)
        begin = place + _ENTRY_NUMBER.size + _ENTRY_LENGTH.size
        self._memory[begin : begin + len(data)] = data
        _ENTRY_LENGTH.pack_into(self._memory, place + _ENTRY_NUMBER.size, len(data))
        _ENTRY_NUMBER.pack_into(self._memory, place, count + 1)
        _RING_HEAD.pack_into(self._memory, self._start, count + 1)

    def read(self, since: int) -> tuple[list[bytes], int]:
        """Return the remaining entries after the first ``since``, and how many have been written in total."""
        count = self.count()
        found = (self._entry(number) for number in range(max(since, count - REPORTS_KEPT), count))
        return [data for data in found if data is not None], count

    def _entry(self, number: int) -> bytes | None:
        """Return an entry; None if another one was written over it in the meantime."""
        place = self._place(number)
        begin = place + _ENTRY_NUMBER.size + _ENTRY_LENGTH.size
        (length,) = _ENTRY_LENGTH.unpack_from(self._memory, place + _ENTRY_NUMBER.size)
        data = self._memory[begin : begin + min(length, REPORT_LIMIT)]
        # Read after the content, to notice a writer that has come round in the meantime.
        (written,) = _ENTRY_NUMBER.unpack_from(self._memory, place)
        return data if written == number + 1 else None

    def count(self) -> int:
        """Return how many entries have been written."""
        count: int = _RING_HEAD.unpack_from(self._memory, self._start)[0]
        return count

    def _place(self, number: int) -> int:
        return self._start + _RING_HEAD.size + number % REPORTS_KEPT * _ENTRY


def read_times(row: bytes) -> tuple[float, ...]:
    """Return a rank's times, for ``in_order``."""
    return _TIMES.unpack(row)


def in_order(times: Sequence[float], since: float = 0.0) -> list[tuple[float, Phase]]:
    """Return when a rank reached each of its phases, from ``since`` on, in order."""
    found = [(at, index) for index, at in enumerate(times) if at and at >= since]
    return [(at, _PHASES[index]) for at, index in sorted(found)]


def _row(local_rank: int) -> int:
    """Return the offset of a rank's row."""
    return _HEAD + local_rank * _ROW
