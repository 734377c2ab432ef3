"""The control protocol between machines: JSON records, one per line, after a handshake.

::

    client: hello (protocol, role, nonce)
    server: welcome                                      or, with a token: challenge (nonce)
    client:                                                                proof
    server:                                                                proof

With a token, each side proves that it knows the token's key: with HMAC-SHA256 over both fresh nonces, its own part in
the exchange and the role. The token itself is never sent. The client proves first, because anybody can connect, and
anybody with a proof can try guesses at the token. Nothing from a client that has not proved itself reaches the store,
and nothing that a server says before its proof decides anything. Without a token on either side, the hello is enough.

A connection of the role "store" carries no more records after that, but pieces of streams (``Pieces``).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any

from mlaunch.base.text import printable

# Add 1 with each change of records, so that two versions of mlaunch refuse each other with a clear message.
PROTOCOL = 10
ROLES = ("control", "store")
LINE_LIMIT = 262_144  # bytes of a record
SENTENCE = 2_000  # bytes of a message for people
_KEEP_ALIVE = 60  # seconds
_VERSIONS = 1_000_000  # each protocol version is below this
HEAD = struct.Struct("<QQ")  # of a piece: stream, size
LONGEST = 1 << 20  # bytes of a piece at most, so that neither side decides how much memory the other needs
_READ = 1 << 18  # bytes at a time

_NONCE, _PROOF = re.compile("[0-9a-f]{1,64}"), re.compile("[0-9a-f]{64}")

Record = dict[str, Any]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class UnprovedError(ConnectionError):
    """The other end has not proved that it belongs to this launch. ``advice``: what people can do about it."""

    def __init__(self, why: str, advice: str = "does another program, or another launch, listen there?") -> None:
        super().__init__(why)
        self.advice = advice


SILENT = UnprovedError(
    "it takes connections and says nothing",
    "was its gate stopped (SIGSTOP, a debugger), or does another program listen there?",
)


class WrongTokenError(ConnectionError):
    """A client speaks mlaunch's protocol, with another token."""


class NoTokenError(WrongTokenError):
    """A client says that it has no token."""


_SAME_TOKEN = "give both the same token= or MLAUNCH_TOKEN, unless another launch has this port"


class RefusedError(Exception):
    """The other side refuses this one, and says why; or this machine has no token, and the master asks for one."""


def encode(record: Record) -> bytes:
    """Return the line of a record. ValueError if it is longer than ``LINE_LIMIT``: the other side would not read it."""
    line = json.dumps(record).encode() + b"\n"
    if len(line) > LINE_LIMIT:
        raise ValueError(f"a record of {len(line)} bytes; a line holds {LINE_LIMIT}: its texts must be bounded")
    return line


def write(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write without waiting. ConnectionError if the connection is closed.

    For that, asyncio's own ``write`` raises nothing, and uvloop's raises RuntimeError.
    """
    if writer.is_closing():
        raise ConnectionResetError("the connection was closed")
    try:
        writer.write(data)
    except RuntimeError as error:
        raise ConnectionResetError("the connection was closed") from error


def post(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write without waiting. If the connection is closed, do nothing: the task that reads from it notices that."""
    with contextlib.suppress(ConnectionError):
        write(writer, data)


async def send(writer: asyncio.StreamWriter, record: Record) -> None:
    write(writer, encode(record))
    await writer.drain()


async def read(reader: asyncio.StreamReader) -> Record:
    """Return the next record. ConnectionError at the end of the connection, or if what comes is no record."""
    try:
        line = await reader.readline()
    except (ValueError, asyncio.LimitOverrunError) as error:
        raise ConnectionError("a line that is too long for a record") from error
    if not line.endswith(b"\n"):
        raise ConnectionError("the connection was closed")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConnectionError("what came is no record") from error
    if not isinstance(record, dict):
        raise ConnectionError("what came is no record")
    return record


@contextlib.contextmanager
def limited(reader: asyncio.StreamReader, seconds: float) -> Iterator[None]:
    """Make reads inside fail with asyncio.TimeoutError after so many seconds, and all later reads, too.

    So the connection is useless after a timeout. Unlike asyncio.wait_for, this makes no task; the gate would need
    several for each of a thousand machines.
    """
    timer = asyncio.get_running_loop().call_later(seconds, reader.set_exception, asyncio.TimeoutError())
    try:
        yield
    finally:
        timer.cancel()


async def introduce(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    role: str,
    token: str | None,
    first: Record | None = None,
) -> None:
    """Do the handshake as the client, and then send the record ``first``.

    Raises:
        RefusedError: One side rejects the other.
        ConnectionError: The other side is no gate, or has not proved that it belongs to this launch.
    """
    nonce = secrets.token_hex(16)
    await send(writer, {"mlaunch": PROTOCOL, "role": role, "nonce": nonce})
    answer = await read(reader)
    if token is not None:
        await _prove_first(reader, writer, role, token, nonce, answer)
    elif "challenge" in answer:
        await send(writer, {"tokenless": 1})  # so that the master can print why this machine does not join
        raise RefusedError("the master asks for a token, and this machine has none; give token= or MLAUNCH_TOKEN")
    elif "refused" in answer:
        raise RefusedError(_other_version(answer) or printable(str(answer["refused"]), SENTENCE))
    elif "welcome" not in answer:
        raise UnprovedError("what answers there is no master of mlaunch")
    if first is not None:
        await send(writer, first)


async def _prove_first(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, role: str, token: str, nonce: str, answer: Record
) -> None:
    """Prove this client to the server, and return once the server has proved itself. ConnectionError if it does not.

    Until then the other side may be anybody, so even its refusal raises no RefusedError.
    """
    if "welcome" in answer:
        raise UnprovedError("the master has no token, and this machine has one", _SAME_TOKEN)
    if "challenge" not in answer:
        raise UnprovedError(_other_version(answer) or "what answers there is no master of mlaunch")
    # Its form is checked, because a NUL in it could shift the parts of the text that is signed.
    theirs = _nonce(answer["challenge"])
    await send(writer, {"proof": _prove(token, "client", nonce, theirs, role)})
    answer = await read(reader)
    if not _is(answer.get("proof"), _prove(token, "server", nonce, theirs, role)):
        raise UnprovedError("wrong token: this machine's and the master's differ", _SAME_TOKEN)


def _other_version(answer: Record) -> str:
    """Return a message, without any text of the other side's, about the version that answers; "" if it gives none."""
    version = answer.get("mlaunch")
    if type(version) is not int or not 0 < version < _VERSIONS:
        return ""
    return f"the master speaks protocol {version}, this machine {PROTOCOL}: the versions of mlaunch differ"


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str | None) -> str:
    """Do the handshake as the server, and return the client's role. ConnectionError if the client is not admitted."""
    hello = await read(reader)
    role, version = str(hello.get("role")), hello.get("mlaunch")
    if type(version) is not int or not 0 < version < _VERSIONS or role not in ROLES:
        raise ConnectionError("a client that does not speak mlaunch")
    nonce = _nonce(hello.get("nonce"))
    if version != PROTOCOL:
        await send(writer, {"refused": "the versions of mlaunch differ", "mlaunch": PROTOCOL})
        raise ConnectionError("a client of another version")
    if token is None:
        await send(writer, {"welcome": PROTOCOL})
        return role
    ours = secrets.token_hex(16)
    # A nonce from each side makes recorded proofs useless at another time, and in the other direction.
    await send(writer, {"challenge": ours})
    answer = await read(reader)
    if "tokenless" in answer:
        raise NoTokenError("a client without a token")
    proof = answer.get("proof")
    if not _is(proof, _prove(token, "client", nonce, ours, role)):
        # No more than that: the reason would help somebody who guesses.
        await send(writer, {"refused": "wrong token"})
        wrong = WrongTokenError if _PROOF.fullmatch(str(proof)) else ConnectionError  # the latter: not a machine
        raise wrong("a client with a wrong token")
    await send(writer, {"proof": _prove(token, "server", nonce, ours, role)})
    return role


def _nonce(said: Any) -> str:
    """Return the other side's nonce. ConnectionError if it does not have the form of one."""
    if not isinstance(said, str) or not _NONCE.fullmatch(said):
        raise ConnectionError("what came is no nonce")
    return said


def _is(said: Any, proof: str) -> bool:
    """True if ``said`` is the proof. The time that this takes does not show how much of it is right."""
    return hmac.compare_digest(str(said).encode(errors="replace"), proof.encode())


def _prove(token: str, who: str, client_nonce: str, server_nonce: str, role: str) -> str:
    text = "\0".join(("mlaunch", who, client_nonce, server_nonce, role))
    return str(hmac.new(token.encode(), text.encode(), "sha256").hexdigest())


def _keep_alive(end: socket.socket) -> None:
    """Turn on TCP keepalive: firewalls forget connections on which ranks send nothing for hours."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_ALIVE)


@contextlib.asynccontextmanager
async def dialled(host: str, port: int, role: str, token: str | None) -> AsyncIterator[Streams]:
    """Connect to a gate as a client of this role, and close the connection at the end. Raises like ``introduce``."""
    reader, writer = await asyncio.open_connection(host, port, limit=LINE_LIMIT)
    _keep_alive(writer.get_extra_info("socket"))
    try:
        await introduce(reader, writer, role, token)
        yield reader, writer
    finally:
        writer.close()


class Pieces:
    """Many streams on one connection, with which a link carries its ranks' traffic with the store to the gate.

    A piece of a stream is the stream's number, the piece's size, and its bytes; a piece without bytes ends the stream.
    Numbers count from 0 in the order in which the streams begin, and none is used twice. All pieces that are sent
    within one turn of the event loop go out in one write.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._out: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def send(self, stream: int, data: bytes) -> None:
        """Send data of a stream, or b"" to end it, in the event loop's next turn."""
        if not self._out:
            # One write for all pieces of a turn of the loop, instead of a system call for each.
            self._loop.call_soon(self._flush)
        for start in range(0, max(1, len(data)), LONGEST):
            piece = data[start : start + LONGEST]
            self._out += HEAD.pack(stream, len(piece)), piece

    def _flush(self) -> None:
        out, self._out = self._out, []
        post(self._writer, b"".join(out))

    @property
    def unsent(self) -> int:
        """How many bytes wait until the other side reads."""
        return self._writer.transport.get_write_buffer_size()

    async def drained(self) -> None:
        await self._writer.drain()

    async def received(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield each piece's stream and data until the connection ends. ConnectionError if a piece is too large."""
        data, at = b"", 0
        while more := await self._reader.read(_READ):
            # Cut once for each read: a cut for each piece would copy the rest as often.
            data, at = data[at:] + more, 0
            while len(data) - at >= HEAD.size:
                stream, size = HEAD.unpack_from(data, at)
                if size > LONGEST:
                    raise ConnectionError("what came is no piece of a stream")
                start = at + HEAD.size
                if len(data) - start < size:
                    break
                at = start + size
                yield stream, data[start:at]
