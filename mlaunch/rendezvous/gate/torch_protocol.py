"""How torch's clients of a store speak, which is torch's own affair: one test fails as soon as it changes.

A request is a byte that says what is asked, then strings (each after its length), then maybe a number. Some have as
many strings as they say first. All numbers are little-endian; lengths, counts and most others have 8 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from mlaunch.rendezvous.gate.store_keys import StoreKeys, Wait

SIZE, _NUMBER, _SHORT = struct.Struct("<Q"), struct.Struct("<q"), struct.Struct("<I")
_MAGIC = 0x3C85F7CE
_MOST_STRINGS = 1 << 17  # in a request, and bytes of a string, that torch's own store takes
LONGEST = 1 << 23
_EACH = 40  # bytes that Python takes for a string besides
_READY, _NOT_READY = b"\0", b"\1"
GO, GIVEN_UP = b"\0", b"\1"
GIVE_UP = b"\x0c"


class Asked(IntEnum):
    """What a client may ask."""

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


# How many strings follow: a number of them, or that many for each of a count that comes first.
_STRINGS = {
    Asked.SET: 2, Asked.COMPARE_SET: 3, Asked.GET: 1, Asked.ADD: 1, Asked.DELETE: 1, Asked.APPEND: 2, Asked.PUSH: 2,
    Asked.POP: 1, Asked.LENGTH: 1, Asked.MEET: 1,
}  # fmt: skip
_COUNTED = {Asked.CHECK: 1, Asked.WAIT: 1, Asked.MULTI_GET: 1, Asked.MULTI_SET: 2}
NUMBERS = {Asked.VALIDATE: _SHORT, Asked.PING: _SHORT, Asked.ADD: _NUMBER, Asked.MEET: _NUMBER}


def shape(asked: Asked) -> tuple[int | None, int, int]:
    """Returns the strings for each of a count (None: there is no count), the strings, and the bytes of the number."""
    number = NUMBERS.get(asked)
    return _COUNTED.get(asked), _STRINGS.get(asked, 0), 0 if number is None else number.size


@dataclass
class Request:
    """One request, as far as it has come. ``lacking``: strings; None: their count has not come."""

    asked: Asked
    lacking: int | None
    strings: list[bytes]
    number: int = 0


class Requests:
    """Cuts a client's bytes, which come in pieces of any size, into requests. None is read twice."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._at = 0
        self._open: Request | None = None
        self._taken = 0  # bytes that the strings of that take

    @property
    def unfinished(self) -> int:
        """How many bytes are kept of a request that is not complete."""
        return len(self._data) + self._taken

    def feed(self, piece: bytes) -> Iterator[Request]:
        """Yields the requests that are complete now. ValueError for what no client of torch's says."""
        self._data += piece
        while (request := self._next()) is not None:
            yield request
        del self._data[: self._at]
        self._at = 0

    def _next(self) -> Request | None:
        request = self._open
        if request is None:
            code = self._take(1)
            if code is None:
                return None
            asked = Asked(code[0])
            request = self._open = Request(asked, None if asked in _COUNTED else _STRINGS.get(asked, 0), [])
        return request if self._complete(request) else None

    def _complete(self, request: Request) -> bool:
        if request.lacking is None:
            count = self._take(SIZE.size)
            if count is None:
                return False
            request.lacking = count_of_strings(SIZE.unpack(count)[0]) * _COUNTED[request.asked]
        if not self._take_strings(request):
            return False
        kind = NUMBERS.get(request.asked)
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
            stop = start + length_of_string(SIZE.unpack_from(data, at)[0])
            if stop > end:
                break
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


class StoreConnection:
    """One client of a store; ``answer`` is given the bytes for it."""

    def __init__(self, keys: StoreKeys, answer: Callable[[bytes], None]) -> None:
        self._keys = keys
        self._answer = answer
        self._requests = Requests()
        self._wait: Wait | None = None
        self._held = 0  # bytes that are kept for it

    def feed(self, piece: bytes) -> None:
        """Does what the client asks. ValueError or LookupError if that cannot be: it is to be let go."""
        for request in self._requests.feed(piece):
            self._do(request)
        self._hold(self._requests.unfinished)

    def _hold(self, size: int) -> None:
        if size != self._held:
            self._keys.hold(size - self._held)
            self._held = size

    def close(self) -> None:
        """Is called when the client is gone."""
        self._hold(0)
        self._give_up()

    def _give_up(self) -> None:
        if self._wait is not None:
            self._keys.give_up(self._wait)
            self._wait = None

    def _do(self, request: Request) -> None:
        if request.asked is Asked.WAIT:
            self._wait = self._keys.wait(request.strings, self._go)
        elif request.asked is Asked.MEET:
            self._wait = self._keys.meet(request.strings[0], request.number, self._go)
        elif request.asked is Asked.GIVE_UP:
            self._give_up()
            self._answer(GIVEN_UP)
        else:
            answer = _ANSWERS[request.asked](self._keys, request.strings, request.number)
            if answer:
                self._answer(answer)

    def _go(self) -> None:
        self._wait = None
        self._answer(GO)


def _set(keys: StoreKeys, strings: list[bytes], _: int) -> bytes:
    for key, value in zip(strings[::2], strings[1::2], strict=True):
        keys.set(key, value)
    return b""


def _append(keys: StoreKeys, strings: list[bytes], _: int) -> bytes:
    keys.append(*strings)
    return b""


def _get(keys: StoreKeys, strings: list[bytes], _: int) -> bytes:
    return b"".join([_string(keys.get(key)) for key in strings])


def _push(keys: StoreKeys, strings: list[bytes], _: int) -> bytes:
    keys.push(*strings)
    return b""


def _pop(keys: StoreKeys, strings: list[bytes], _: int) -> bytes:
    length, value = keys.pop(*strings)
    return _NUMBER.pack(length) + (_string(value) if length else b"")


def _names(keys: StoreKeys, _: list[bytes], __: int) -> bytes:
    names = keys.names()
    return _NUMBER.pack(len(names)) + b"".join(map(_string, names))


# What is answered at once, b"": not at all.
_ANSWERS: dict[Asked, Callable[[StoreKeys, list[bytes], int], bytes]] = {
    Asked.VALIDATE: lambda _keys, _strings, _number: b"",
    Asked.PING: lambda _keys, _strings, number: _SHORT.pack(number),
    Asked.SET: _set,
    Asked.MULTI_SET: _set,
    Asked.APPEND: _append,
    Asked.PUSH: _push,
    Asked.GET: _get,
    Asked.MULTI_GET: _get,
    Asked.POP: _pop,
    Asked.NAMES: _names,
    Asked.COMPARE_SET: lambda keys, strings, _: _string(keys.compare_set(*strings)),
    Asked.ADD: lambda keys, strings, number: _NUMBER.pack(keys.add(strings[0], number)),
    Asked.CHECK: lambda keys, strings, _: _READY if keys.has(strings) else _NOT_READY,
    Asked.COUNT: lambda keys, _strings, _number: _NUMBER.pack(keys.count()),
    Asked.DELETE: lambda keys, strings, _: _NUMBER.pack(keys.delete(*strings)),
    Asked.LENGTH: lambda keys, strings, _: _NUMBER.pack(keys.length(*strings)),
}


def _string(value: bytes) -> bytes:
    return SIZE.pack(len(value)) + value


def greets(said: object) -> bool:
    """Is true. ValueError if that is not what every client says first."""
    if not isinstance(said, Request) or (said.asked, said.number) != (Asked.VALIDATE, _MAGIC):
        raise ValueError("no client of torch's store")
    return True


def pong(request: Request) -> bytes:
    """Returns the answer to a PING."""
    return _SHORT.pack(request.number)


def count_of_strings(said: int) -> int:
    """Returns how many strings follow. ValueError for more than any client has."""
    return bounded(said, _MOST_STRINGS)


def length_of_string(said: int) -> int:
    """Returns how many bytes follow. ValueError for more than any client has."""
    return bounded(said, LONGEST)


def bounded(number: int, most: int, least: int = 0) -> int:
    """Returns the number. ValueError if it is more, or less."""
    if not least <= number <= most:
        raise ValueError(f"a request with {number}; from {least} to {most}")
    return number
