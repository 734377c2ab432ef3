"""The protocol between torch's stores and their clients. It is torch's own, and a test fails as soon as it changes.

A client with an unknown request is refused, and a warning says which releases of torch were tried.

A request is a byte that says what the client asks, then strings (each after its length), then maybe a number. In some
requests, the number of strings comes first. All numbers are little-endian; most, such as lengths, have 8 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

SIZE, NUMBER, SHORT = struct.Struct("<Q"), struct.Struct("<q"), struct.Struct("<I")
# In the first request of each torch client; torch's server closes connections of other clients.
_MAGIC = 0x3C85F7CE
_MOST_STRINGS = 1 << 17  # strings in a request; like the next one, the limit of torch's own store
LONGEST = 1 << 23  # bytes of a string
_EACH = 40  # bytes that Python takes for a string in addition
GO, GIVEN_UP = b"\0", b"\1"


class UnknownRequestError(ValueError):
    """A client has made a request that none of the tried releases of torch makes."""


class Asked(IntEnum):
    """The first byte of a request: what the client asks."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    COUNT = 7
    DELETE = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    GIVE_UP = 12
    PING = 13
    PUSH = 14
    POP = 15
    LENGTH = 16
    NAMES = 17
    MEET = 18


_CODES = frozenset(Asked)
# How many strings follow: so many, or so many for each one of a count that comes first.
_STRINGS = {
    Asked.SET: 2, Asked.COMPARE_SET: 3, Asked.GET: 1, Asked.ADD: 1, Asked.DELETE: 1, Asked.APPEND: 2, Asked.PUSH: 2,
    Asked.POP: 1, Asked.LENGTH: 1, Asked.MEET: 1,
}  # fmt: skip
_COUNTED = {Asked.CHECK: 1, Asked.WAIT: 1, Asked.MULTI_GET: 1, Asked.MULTI_SET: 2}
_NUMBERS = {Asked.VALIDATE: SHORT, Asked.PING: SHORT, Asked.ADD: NUMBER, Asked.MEET: NUMBER}


@dataclass
class Request:
    """One request, as far as it has come. ``lacking``: how many strings; None if their count has not come yet."""

    asked: Asked
    lacking: int | None
    strings: list[bytes]
    number: int = 0


class Requests:
    """The parser of a client's requests, whose bytes come in pieces of any size. It reads no byte twice."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._at = 0
        self._open: Request | None = None
        self._taken = 0  # bytes that the strings of the open request take

    @property
    def unfinished(self) -> int:
        """How many bytes of an incomplete request are kept."""
        return len(self._data) + self._taken

    def feed(self, piece: bytes) -> Iterator[Request]:
        """Yield the requests that are complete with this piece. ValueError for bytes that no torch client sends."""
        self._data += piece
        while (request := self._next()) is not None:
            yield request
        # Once for each piece and not for each request, because each cut moves the rest.
        del self._data[: self._at]
        self._at = 0

    def _next(self) -> Request | None:
        request = self._open
        if request is None:
            code = self._take(1)
            if code is None:
                return None
            if code[0] not in _CODES:
                raise UnknownRequestError(f"request {code[0]}")
            asked = Asked(code[0])
            request = self._open = Request(asked, None if asked in _COUNTED else _STRINGS.get(asked, 0), [])
        return request if self._complete(request) else None

    def _complete(self, request: Request) -> bool:
        if request.lacking is None:
            count = self._take(SIZE.size)
            if count is None:
                return False
            request.lacking = _bounded(SIZE.unpack(count)[0], _MOST_STRINGS) * _COUNTED[request.asked]
        if not self._take_strings(request):
            return False
        kind = _NUMBERS.get(request.asked)
        if kind is not None:
            number = self._take(kind.size)
            if number is None:
                return False
            (request.number,) = kind.unpack(number)
        self._open, self._taken = None, 0
        return True

    def _take_strings(self, request: Request) -> bool:
        data, at, end = self._data, self._at, len(self._data)
        while request.lacking and end - at >= SIZE.size:
            start = at + SIZE.size
            stop = start + _bounded(SIZE.unpack_from(data, at)[0], LONGEST)
            if stop > end:
                break
            # A copy, because the buffer is cut and used again.
            request.strings.append(bytes(data[start:stop]))
            self._taken += stop - start + _EACH
            request.lacking -= 1
            at = stop
        self._at = at
        return not request.lacking

    def _take(self, size: int) -> bytes | None:
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            self._at = start
            return None
        return bytes(self._data[start : self._at])


def check_greeting(said: Request) -> None:
    """Raise ValueError if this is not the request that every torch client sends first."""
    if (said.asked, said.number) != (Asked.VALIDATE, _MAGIC):
        raise ValueError("no client of torch's store")


def _bounded(number: int, most: int) -> int:
    """Return the number. ValueError if it is larger than in any valid request."""
    if number > most:
        raise ValueError(f"a request with {number}; at most {most}")
    return number
