"""Records, each with an optional file, over two byte streams between a caller and a member on another machine.

Any two streams will do: the pipes of ``ssh`` or ``srun``, or a socket. A frame is::

    size of the record, size of the content | the record, pickled | the content | a line feed

The line feed is for engines that pass on whole lines, as Slurm does. Large data is content: it is sent from a file and
received into a memfd, so that neither side holds it in memory a second time. If both sides have a secret, a code
follows the record, and another one the content (``FrameCodes``): nothing is unpickled before its code is checked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import pickle
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from mlaunch.base.fds import close_all, close_in_forks, memory_file, renewed

_SIZE = 32  # bytes of a code
# The largest size of a pipe that an unprivileged user may set (fs.pipe-max-size).
CHUNK = 1 << 20  # bytes that are read or written at once
Incoming = TypeVar("Incoming", covariant=True)  # the records that come: see ``mlaunch.engines.wire``
Outgoing = TypeVar("Outgoing", contravariant=True)  # those that it takes
_HEAD = struct.Struct("!IQ")
_END = b"\n"
_LINE = 1 << 16  # bytes of the first line, at most
_SHOWN = 40  # bytes of noise in an error's text
_MOST = 1 << 24  # bytes of a record: anything larger is noise


class NoiseError(OSError):
    """The other end has sent something that is not from mlaunch. ``hint``: a possible reason."""

    hint = ": a profile that prints, or another program?"


class ForgedError(NoiseError):
    """The other end's data does not have the right authentication code."""

    hint = ": somebody on the network between the machines has changed or sent it; mlaunch has used nothing of it"


class Code(Protocol):
    """An authentication code of data that comes piece by piece."""

    def update(self, data: bytes, /) -> None: ...

    def digest(self) -> bytes: ...


class _None:
    def update(self, data: bytes, /) -> None:
        pass

    def digest(self) -> bytes:
        return b""


class FrameCodes:
    """Authentication codes of frames, made from a secret that both sides share and each frame's number.

    So frames that somebody else has written to the network between machines, or has changed, left out, sent again or
    sent back, are refused before they are read. If nobody else can write there, there is no secret and no code.

    Attributes:
        size: Bytes of a code; 0: there are no codes.
    """

    def __init__(self, secret: str, sender: str) -> None:
        self.size = _SIZE if secret else 0
        # A key for each direction: a frame of this side's that is sent back to it does not have the right code.
        self._key = hmac.digest(secret.encode(), b"mlaunch frames\0" + sender.encode(), "sha256")
        self._frame = 0
        self._forged = False

    def check(self, code: bytes | bytearray, expected: bytes) -> None:
        """Raise ForgedError, now and at each later check, unless they are equal. Compares in constant time."""
        self._forged = self._forged or not hmac.compare_digest(code, expected)
        if self._forged:
            raise ForgedError("sent data with a wrong code")

    def of_record(self, data: bytes) -> bytes:
        """Return the code of the next frame's head and record."""
        # Counted on both sides and never sent: a frame that is left out, sent twice or moved has a wrong code.
        self._frame += 1
        code = self._begin(b"record")
        code.update(data)
        return code.digest()

    def of_content(self) -> Code:
        """Begin the code of the same frame's content."""
        return self._begin(b"content")

    def _begin(self, part: bytes) -> Code:
        if not self.size:
            return _None()
        return hmac.new(self._key, b"%d\0%b\0" % (self._frame, part), "sha256")


@dataclass
class Piece:
    """Data that waits to be written: bytes, or the rest of a file and then its code."""

    data: memoryview
    fd: int = -1
    offset: int = 0
    size: int = 0
    code: Code | None = None

    def next(self) -> memoryview:
        """Return the next bytes to write; empty at the end."""
        if not self.data and self.code is not None:
            self.data = memoryview(self._read() if self.offset < self.size else self._finish(self.code))
        return self.data

    def _read(self) -> bytes:
        # pread: several streams may send the same file, and would share its position.
        data = os.pread(self.fd, min(CHUNK, self.size - self.offset), self.offset)
        self.offset += len(data)
        if not data:
            raise OSError(f"a file of {self.size} bytes ended before its end; who cut it?")
        if self.code is not None:
            self.code.update(data)
        return data

    def _finish(self, code: Code) -> bytes:
        self.code = None
        return code.digest()

    @property
    def left(self) -> int:
        return len(self.data) + max(0, self.size - self.offset)


class Content:
    """A record whose content is being received into a memfd. ``code``: of what has come so far."""

    def __init__(self, record: bytes, size: int, code: Code) -> None:
        self.record = record
        self.code = code
        self.size = size
        self._left = size
        self._fd = memory_file("content") if size else -1

    def fill(self, incoming: int, note_life: Callable[[], None]) -> None:
        """Move the rest straight from the stream into the memfd. BlockingIOError if it has not all come."""
        while self._left:
            data = os.read(incoming, min(CHUNK, self._left))
            if not data:
                raise EOFError("the other end of the stream is closed")
            note_life()
            self._write(data)

    def take(self, came: bytearray) -> bool:
        """Move content out of ``came``, which was read before. Return True if the content is complete."""
        most = min(self._left, len(came))
        if most:
            self._write(bytes(came[:most]))
            del came[:most]
        return self._left == 0

    def _write(self, data: bytes) -> None:
        self.code.update(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        self._left -= len(data)

    def release(self) -> int:
        """Return the memfd, which the receiver owns from now on."""
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        """Close the memfd, unless it was released. May be called again."""
        fd = self.release()
        if fd >= 0:
            os.close(fd)


class FrameStream(Generic[Incoming, Outgoing]):
    """One end of a stream of frames. It owns its descriptors and never blocks: poll ``fileno()`` and ``outgoing``.

    ``secret``: shared by both ends, if others can write to the connection. ``member``: this is a member's end.
    """

    def __init__(self, incoming: int, outgoing: int, secret: str = "", *, member: bool = False) -> None:
        self.incoming, self.outgoing = incoming, outgoing
        close_in_forks(self)
        os.set_blocking(incoming, False)
        os.set_blocking(outgoing, False)
        for end in (incoming, outgoing):
            with contextlib.suppress(OSError):  # it is no pipe, or this user has too many large ones
                # 64 KiB is the default: many small turns for a value of gigabytes.
                fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, CHUNK)
        self.heard_at = time.monotonic()  # when something came last
        self._sending = renewed(threading.RLock())  # several threads may send
        self._waiting: deque[Piece] = deque()
        ends = ["caller", "member"]
        self._ours, self._theirs = FrameCodes(secret, ends[member]), FrameCodes(secret, ends[not member])
        self._came = bytearray()
        self._content: Content | None = None

    def fileno(self) -> int:
        return self.incoming

    @property
    def unsent(self) -> int:
        """The number of bytes that wait to be written."""
        with self._sending:
            return sum(piece.left for piece in self._waiting)

    def send(self, record: Outgoing, content: int = -1) -> None:
        """Queue a record, with a duplicate of its file ``content`` (-1: none). Write what can be written now."""
        data = pickle.dumps(record)
        size = os.fstat(content).st_size if content >= 0 else 0
        with self._sending:
            data = _HEAD.pack(len(data), size) + data
            self._waiting.append(Piece(memoryview(data + self._ours.of_record(data) + (b"" if size else _END))))
            if size:
                self._waiting.append(Piece(memoryview(b""), os.dup(content), 0, size, self._ours.of_content()))
                self._waiting.append(Piece(memoryview(_END)))
        self.flush()

    def flush(self) -> bool:
        """Write what can be written without waiting; True if nothing is left. A reader that is gone is no error."""
        with self._sending:
            return self._write_now()

    def _write_now(self) -> bool:
        try:
            while self._waiting:
                piece = self._waiting[0]
                data = piece.next()
                if data:
                    piece.data = data[os.write(self.outgoing, data) :]
                elif piece.left == 0:
                    self._drop_first()
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):  # the next read reports it
            self.forget()
        return True

    def forget(self) -> None:
        """Drop what waits to be written."""
        while self._waiting:
            self._drop_first()

    def _drop_first(self) -> None:
        piece = self._waiting.popleft()
        if piece.fd >= 0:
            os.close(piece.fd)

    def write_line(self, mark: bytes, text: bytes) -> None:
        """Write the line to which the other end skips, and wait until all of it is written."""
        code = self._ours.of_record(text).hex().encode()
        os.set_blocking(self.outgoing, True)
        os.write(self.outgoing, b"\n" + mark + code + text + b"\n")
        os.set_blocking(self.outgoing, False)

    def skip_to(self, mark: bytes) -> bytes | None:
        """Return the line that begins with ``mark``, without the mark; None if it is not there yet.

        Drops what comes before it, such as a login shell's greeting. EOFError if the line never comes.
        """
        with contextlib.suppress(BlockingIOError):
            self._fill()
        start = self._came.find(mark)
        end = self._came.find(b"\n", start) if start >= 0 else -1
        if end < 0:
            # Output may come without end: keep only what may be the beginning of the line.
            del self._came[: start if start >= 0 else max(0, len(self._came) - len(mark))]
            if len(self._came) > _LINE:
                del self._came[: len(mark)]
            return None
        line = bytes(self._came[start + len(mark) : end])
        del self._came[: end + 1]
        code, line = line[: 2 * self._theirs.size], line[2 * self._theirs.size :]
        self._theirs.check(code, self._theirs.of_record(line).hex().encode())
        return line

    def receive(self, most: int | None = None) -> list[tuple[Incoming, int]]:
        """Return the records that have come in full, each with a memfd that the receiver owns, or -1.

        ``most``: the largest number to return. The others wait for the next call, though there may be nothing to read
        then.

        Raises:
            EOFError: The other end is gone, and all that it sent was received.
            NoiseError: The data is not from mlaunch, or not from the other end.
        """
        found: list[tuple[Incoming, int]] = []
        try:
            if self._content is not None:
                self._content.fill(self.incoming, self._note_life)
            self._fill()
        except BlockingIOError:
            pass
        except EOFError:
            found = self._take(most)
            if not found:
                raise
            return found
        return self._take(most)

    def _fill(self) -> None:
        try:
            data = os.read(self.incoming, CHUNK)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError("the other end of the stream is closed")
        self._note_life()
        self._came += data

    def _note_life(self) -> None:
        self.heard_at = time.monotonic()

    def _take(self, most: int | None) -> list[tuple[Incoming, int]]:
        found: list[tuple[Incoming, int]] = []
        while True:
            if len(found) == most:
                return found
            if self._content is None and not self._begin():
                return found
            content = self._content
            if content is None or not content.take(self._came):
                return found
            size = self._theirs.size if content.size else 0
            if len(self._came) < size + len(_END):
                return found
            self._theirs.check(self._came[:size], content.code.digest() if size else b"")
            if self._came[size : size + len(_END)] != _END:
                raise _noise(self._came[size:])
            del self._came[: size + len(_END)]
            # Only after the check of its code: to unpickle is to run code.
            found.append((pickle.loads(content.record), content.release()))
            self._content = None

    def _begin(self) -> bool:
        """Begin the next frame. Return False if its record is not there yet."""
        if len(self._came) < _HEAD.size:
            return False
        size, content = _HEAD.unpack_from(self._came)
        # Noise has a "size", too, for which one would wait for ever.
        if size > _MOST:
            raise _noise(self._came)
        end = _HEAD.size + size
        if len(self._came) < end + self._theirs.size:
            return False
        self._theirs.check(self._came[end : end + self._theirs.size], self._theirs.of_record(bytes(self._came[:end])))
        self._content = Content(bytes(self._came[_HEAD.size : end]), content, self._theirs.of_content())
        del self._came[: end + self._theirs.size]
        return True

    def hang_up(self) -> None:
        """Close this end for writing, so that the other end sees EOF. What comes from there can still be read."""
        with self._sending, open(os.devnull, "wb") as nothing:
            self.forget()
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.outgoing)) as connection:
                connection.shutdown(socket.SHUT_WR)  # others have duplicates of it
            # The number stays taken: another thread may be about to write to it.
            os.dup2(nothing.fileno(), self.outgoing, inheritable=False)

    def close(self) -> None:
        """Close both descriptors. May be called again; it then leaves the numbers alone, which others may have."""
        self.forget()
        if self._content is not None:
            self._content.close()
        owned, self.incoming, self.outgoing = {self.incoming, self.outgoing}, -1, -1
        close_all(owned - {-1})


def _noise(came: bytearray) -> NoiseError:
    beginning = bytes(came[:_SHOWN])
    return NoiseError(f"wrote something that is not from mlaunch to its standard output, beginning {beginning!r}")
