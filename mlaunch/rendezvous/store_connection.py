"""The answers of a launch's store to one client."""

from __future__ import annotations

import functools
from collections.abc import Callable

from mlaunch.rendezvous.store_keys import StoreKeys, Wait
from mlaunch.rendezvous.torch_protocol import (
    GIVEN_UP,
    GO,
    NUMBER,
    SHORT,
    SIZE,
    Asked,
    Request,
    Requests,
    UnknownRequestError,
    check_greeting,
)

_READY, _NOT_READY = b"\0", b"\1"
_GREETING = 8  # bytes, at most, that a client sends before its greeting is complete


class StoreConnection:
    """One client of a store. ``answer``: called with the bytes to send to the client."""

    def __init__(self, keys: StoreKeys, answer: Callable[[bytes], None]) -> None:
        self._keys = keys
        self._answer = answer
        self._requests = Requests()
        self._greeted = False
        self._wait: Wait | None = None
        self._held = 0  # bytes that are kept for this client

    def feed(self, piece: bytes) -> None:
        """Handle bytes from the client.

        ValueError or LookupError if it asks for the impossible: the caller then closes the connection.
        """
        try:
            for request in self._requests.feed(piece):
                if self._greeted:
                    self._do(request)
                else:
                    check_greeting(request)
                    self._greeted = True
        except UnknownRequestError as error:
            if self._greeted:  # else it may be a port scanner
                _tell_of_unknown(str(error))
            raise
        if not self._greeted and self._requests.unfinished > _GREETING:
            raise ValueError("no client of torch's store")
        # Half a request counts, too: else many clients that never finish one would fill the memory.
        self._hold(self._requests.unfinished)

    def _hold(self, size: int) -> None:
        if size != self._held:
            self._keys.hold(size - self._held)
            self._held = size

    def close(self) -> None:
        """Free what is kept for the client. Call this when it is gone."""
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


@functools.lru_cache(1)  # once in a process: all ranks ask its store the same
def _tell_of_unknown(what: str) -> None:
    import importlib.metadata

    from mlaunch.base.log import log
    from mlaunch.torch_parts.lacking import TRIED

    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # this process needs no torch, and some builds register none
        version = "of its ranks"
    log.warning(
        "the launch's store was asked what it does not know (%s), and refused: torch %s asks otherwise than the "
        "releases that mlaunch was tried with (%s); install one of these",
        what, version, TRIED,
    )  # fmt: skip


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
    return NUMBER.pack(length) + (_string(value) if length else b"")


def _names(keys: StoreKeys, _: list[bytes], __: int) -> bytes:
    names = keys.names()
    return NUMBER.pack(len(names)) + b"".join(map(_string, names))


# The requests that are answered at once. b"": no answer.
_ANSWERS: dict[Asked, Callable[[StoreKeys, list[bytes], int], bytes]] = {
    Asked.PING: lambda _keys, _strings, number: SHORT.pack(number),
    Asked.SET: _set,
    Asked.MULTI_SET: _set,
    Asked.APPEND: _append,
    Asked.PUSH: _push,
    Asked.GET: _get,
    Asked.MULTI_GET: _get,
    Asked.POP: _pop,
    Asked.NAMES: _names,
    Asked.COMPARE_SET: lambda keys, strings, _: _string(keys.compare_set(*strings)),
    Asked.ADD: lambda keys, strings, number: NUMBER.pack(keys.add(strings[0], number)),
    Asked.CHECK: lambda keys, strings, _: _READY if keys.has(strings) else _NOT_READY,
    Asked.COUNT: lambda keys, _strings, _number: NUMBER.pack(keys.count()),
    Asked.DELETE: lambda keys, strings, _: NUMBER.pack(keys.delete(*strings)),
    Asked.LENGTH: lambda keys, strings, _: NUMBER.pack(keys.length(*strings)),
}


def _string(value: bytes) -> bytes:
    return SIZE.pack(len(value)) + value
