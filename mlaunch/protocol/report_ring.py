"""What a rank reports (``mlaunch.report``), in memory that its launcher shares: a ring, so nobody waits for its reader.

The rank alone writes. A reader that is too slow misses the oldest, and knows how many. An entry has its number, which
is written last, and is void while the entry is being written.
"""

from __future__ import annotations

import mmap
import struct

ENTRIES = 256
LIMIT = 500  # bytes of an entry
_HEAD = struct.Struct("=Q")  # how many were written
_NUMBER = struct.Struct("=Q")
_LENGTH = struct.Struct("=H")
_ENTRY = 512
SIZE = _HEAD.size + ENTRIES * _ENTRY  # bytes; those that nobody writes to take no memory


class ReportRing:
    """The ring that begins at a place of some memory."""

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._memory, self._start = memory, start

    def add(self, data: bytes) -> None:
        """Adds an entry of ``LIMIT`` bytes at most."""
        count = self.count()
        place = self._place(count)
        # Void while it is written: a reader that finds another number than it came for leaves the entry out.
        _NUMBER.pack_into(self._memory, place, 0)
        begin = place + _NUMBER.size + _LENGTH.size
        self._memory[begin : begin + len(data)] = data
        _LENGTH.pack_into(self._memory, place + _NUMBER.size, len(data))
        _NUMBER.pack_into(self._memory, place, count + 1)
        _HEAD.pack_into(self._memory, self._start, count + 1)

    def read(self, since: int) -> tuple[list[bytes], int]:
        """Returns the entries that are left of those after the first ``since``, and how many there have been."""
        count = self.count()
        found = (self._entry(number) for number in range(max(since, count - ENTRIES), count))
        return [data for data in found if data is not None], count

    def _entry(self, number: int) -> bytes | None:
        """Returns an entry; None if another was written over it meanwhile."""
        place = self._place(number)
        begin = place + _NUMBER.size + _LENGTH.size
        (length,) = _LENGTH.unpack_from(self._memory, place + _NUMBER.size)
        data = self._memory[begin : begin + min(length, LIMIT)]
        # Read after the content, so that a writer which has come round meanwhile is noticed.
        (written,) = _NUMBER.unpack_from(self._memory, place)
        return data if written == number + 1 else None

    def count(self) -> int:
        """Returns how many entries were written."""
        count: int = _HEAD.unpack_from(self._memory, self._start)[0]
        return count

    def _place(self, number: int) -> int:
        return self._start + _HEAD.size + number % ENTRIES * _ENTRY
