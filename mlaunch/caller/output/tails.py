"""The end of what each rank of a call printed, for the call's report."""

from __future__ import annotations

from collections.abc import Sequence

_RANK = 64 * 1024  # bytes of a rank
_LAUNCH = 1024 * 1024  # bytes of all together: a launcher remembers several reports


class Tails:
    """The latest lines of ``size`` ranks."""

    def __init__(self, size: int) -> None:
        self._limit = min(_RANK, _LAUNCH // max(size, 1))
        self._tails: dict[int, bytearray] = {}

    def add(self, rank: int, lines: Sequence[bytes]) -> None:
        tail = self._tails.setdefault(rank, bytearray())
        tail += b"".join(line + b"\n" for line in lines)
        if len(tail) > 2 * self._limit:  # so that there is more than the limit if anything was cut
            del tail[: -self._limit - 1]

    def of_ranks(self) -> dict[int, bytes]:
        """Returns those of the ranks that printed, each beginning with a whole line if it can."""
        return {rank: self._whole(tail) for rank, tail in self._tails.items()}

    def _whole(self, tail: bytearray) -> bytes:
        if len(tail) <= self._limit:
            return bytes(tail)
        start = tail.find(b"\n", -self._limit - 1) + 1
        return bytes(tail[start if start < len(tail) else -self._limit :])
