"""Records and what belongs to them over two byte streams: between a caller and a member on another machine.

Whatever an engine gives will do, the pipes of ``ssh`` or ``srun`` as well as a socket. A frame is::

    size of the record, size of the content | the record, pickled | the content | a line feed

The line feed is for engines that pass on whole lines, as Slurm does. What is large is content: it goes from a file and
into a memfd, so that neither side holds it in memory a second time. Where both sides have a secret, a code follows the
record, and another one the content (``frame_codes``): nothing is unpickled before its code was found right.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import socket
import struct
import threading
import time
from collections import deque
from typing import Generic, TypeVar

from mlaunch.base.fds import close_all, close_in_forks, renewed
from mlaunch.engines.wire.content import CHUNK, Content, Piece
from mlaunch.engines.wire.frame_codes import FrameCodes, NoiseError

Incoming = TypeVar("Incoming", covariant=True)  # the records that come: see member_streams.py
Outgoing = TypeVar("Outgoing", contravariant=True)  # those that it takes

_HEAD = struct.Struct("!IQ")
_END = b"\n"
_LINE = 1 << 16  # bytes of the first line, at most
_SHOWN = 40  # bytes of what is not of mlaunch
_MOST = 1 << 24  # bytes of a record: what says more is not one of ours


class FrameStream(Generic[Incoming, Outgoing]):
    """One end, which owns its descriptors and never waits. Who uses it polls ``fileno()``, and ``outgoing``.

    ``secret``: of both ends, where others can write to what is between them. ``member``: this is a member's end.
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
        self._sending = renewed(threading.RLock())  # several threads may
        self._waiting: deque[Piece] = deque()
        ends = ["caller", "member"]
        self._ours, self._theirs = FrameCodes(secret, ends[member]), FrameCodes(secret, ends[not member])
        self._came = bytearray()
        self._content: Content | None = None

    def fileno(self) -> int:
        return self.incoming

    @property
    def unsent(self) -> int:
        """How many bytes wait to be written."""
        with self._sending:
            return sum(piece.left for piece in self._waiting)

    def send(self, record: Outgoing, content: int = -1) -> None:
        """Queues a record, and a duplicate of the file that belongs to it; writes what can be written now."""
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
        """Writes what can be written without waiting; True if nothing is left. A reader that is gone is no error."""
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
        except (BrokenPipeError, ConnectionResetError):  # which reading tells, too
            self.forget()
        return True

    def forget(self) -> None:
        """Drops what waits to be written."""
        while self._waiting:
            self._drop_first()

    def _drop_first(self) -> None:
        piece = self._waiting.popleft()
        if piece.fd >= 0:
            os.close(piece.fd)

    def write_line(self, mark: bytes, text: bytes) -> None:
        """Writes the line that the other end skips to, and waits until all of it is written."""
        code = self._ours.of_record(text).hex().encode()
        os.set_blocking(self.outgoing, True)
        os.write(self.outgoing, b"\n" + mark + code + text + b"\n")
        os.set_blocking(self.outgoing, False)

    def skip_to(self, mark: bytes) -> bytes | None:
        """Returns the line that begins with ``mark`` once it is there, less the mark; None: it is not yet.

        What comes before it, as a login shell's greeting, is dropped. EOFError if it never comes.
        """
        with contextlib.suppress(BlockingIOError):
            self._fill()
        start = self._came.find(mark)
        end = self._came.find(b"\n", start) if start >= 0 else -1
        if end < 0:
            # Of what can come without end no more is kept than what may be the beginning of the line.
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
        """Returns what has come in full: records, each with a memfd that the receiver owns, or -1.

        With ``most``, the rest waits for the next time, though nothing may be left to read then.

        Raises:
            EOFError: The other end is gone, and all that it sent was received before.
            NoiseError: What came is not of mlaunch, or not of the other end.
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
            # Only now that the code was right: to unpickle is to run code.
            found.append((pickle.loads(content.record), content.release()))
            self._content = None

    def _begin(self) -> bool:
        """Begins the next frame; False if its record is not there yet."""
        if len(self._came) < _HEAD.size:
            return False
        size, content = _HEAD.unpack_from(self._came)
        # What is no frame says a size all the same; to wait for so much would be to wait for ever.
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
        """Lets the other end find that nobody is here any more. What comes from there can still be read."""
        with self._sending, open(os.devnull, "wb") as nothing:
            self.forget()
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.outgoing)) as connection:
                connection.shutdown(socket.SHUT_WR)  # others have duplicates of it
            # The number stays taken: another thread may be about to write to it.
            os.dup2(nothing.fileno(), self.outgoing, inheritable=False)

    def close(self) -> None:
        """Closes both descriptors. May be called again: by then their numbers may be somebody else's."""
        self.forget()
        if self._content is not None:
            self._content.close()
        owned, self.incoming, self.outgoing = {self.incoming, self.outgoing}, -1, -1
        close_all(owned - {-1})


def _noise(came: bytearray) -> NoiseError:
    beginning = bytes(came[:_SHOWN])
    return NoiseError(f"wrote something else than mlaunch on its standard output, beginning {beginning!r}")
