"""Cuts what a rank says to the store: what its machine's link does for it, and what the link only passes on.

Of what is passed on nothing is kept, however large a value is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mlaunch.rendezvous.gate import torch_protocol
from mlaunch.rendezvous.gate.store_keys import ARRIVED
from mlaunch.rendezvous.gate.torch_protocol import SIZE, Asked, Request

_OURS = frozenset((Asked.VALIDATE, Asked.PING, Asked.MEET, Asked.GIVE_UP))
_LONGEST_KEY = 1 << 16  # bytes, of a meeting
_MARKS = f"/{ARRIVED}".encode()  # how the key ends at which ranks leave their marks
_LONGEST_MARK = 256  # bytes, and of its key


class Splitter:
    """One client's bytes, which come in pieces of any size."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._at = 0
        # Of a request that is passed on, what has not come:
        self._unseen = 0  # bytes of a string
        self._each: int | None = None  # strings for each of a count, which comes first
        self._strings = 0
        self._number = 0  # bytes

    def feed(self, piece: bytes) -> Iterator[bytes | Request]:
        """Yields bytes to pass on and requests for the link. ValueError for what no client of torch's says."""
        self._data += piece
        while self._at < len(self._data):
            found = self._pass_on() if self._is_within() else self._begin()
            if not found:
                break
            yield found
        del self._data[: self._at]
        self._at = 0

    def _is_within(self) -> bool:
        return bool(self._unseen or self._strings or self._number or self._each is not None)

    def _begin(self) -> bytes | Request | None:
        asked = Asked(self._data[self._at])
        if asked in _OURS:
            return self._take(asked)
        # Marks of ranks that come are collected as well, which took the gate's work for 8,192 ranks from 0.4 s to
        # 0.3.
        if asked is Asked.APPEND and (mark := self._mark()):
            return mark
        self._unseen = 1  # the byte that says what is asked
        self._each, self._strings, self._number = torch_protocol.shape(asked)
        return self._pass_on()

    def _mark(self) -> Request | None:
        """Returns what is appended, if that is a rank's mark and all of it is there; clients send it in one piece."""
        strings, at = [], self._at + 1
        for _ in range(2):
            size = int.from_bytes(self._data[at : at + SIZE.size], "little")
            at += SIZE.size + size
            if at > len(self._data) or size > _LONGEST_MARK:
                return None
            strings.append(bytes(self._data[at - size : at]))
        if not strings[0].endswith(_MARKS):
            return None
        self._at = at
        return Request(Asked.APPEND, 0, strings)

    def _pass_on(self) -> bytes:
        start, end = self._at, len(self._data)
        while self._is_within():
            if self._unseen:
                step = min(self._unseen, end - self._at)
                self._unseen -= step
                self._at += step
                if self._unseen:
                    break
            elif self._each is None and not self._strings:
                self._unseen, self._number = self._number, 0
            elif end - self._at < SIZE.size:
                break
            else:
                self._take_size(SIZE.unpack_from(self._data, self._at)[0])
        return bytes(self._data[start : self._at])

    def _take_size(self, size: int) -> None:
        """Takes in a count of strings, or the length of one."""
        self._at += SIZE.size
        if self._each is not None:
            self._strings, self._each = self._each * torch_protocol.count_of_strings(size), None
        else:
            self._strings -= 1
            self._unseen = torch_protocol.length_of_string(size)

    def _take(self, asked: Asked) -> Request | None:
        """Returns a request of those that are for the link, if all of it is there."""
        request = Request(asked, 0, [])
        at, kind = self._at + 1, torch_protocol.NUMBERS.get(asked)
        if asked is Asked.MEET:
            if len(self._data) - at < SIZE.size:
                return None
            (size,) = SIZE.unpack_from(self._data, at)
            at += SIZE.size + torch_protocol.bounded(size, _LONGEST_KEY)
            request.strings.append(bytes(self._data[at - size : at]))
        if kind is not None:
            if len(self._data) - at < kind.size:
                return None
            (request.number,) = kind.unpack_from(self._data, at)
            at += kind.size
        self._at = at
        return request


def marks(key: bytes, left: Iterable[bytes]) -> bytes:
    """Returns the request to append the marks that ranks have left at a key."""
    strings = key, b"".join(left)
    return bytes([Asked.APPEND]) + b"".join(SIZE.pack(len(string)) + string for string in strings)
