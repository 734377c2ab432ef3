"""Several byte streams over one: where an engine gives a stream to one of its machines alone."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from mlaunch.engines.wire.first_process import Lead
from mlaunch.engines.wire.frame_stream import FrameStream

_READ = 1 << 18  # bytes
_LAST_WORDS_TIMEOUT = 10.0  # seconds, once all streams here have ended
_FULL = 1 << 22  # bytes that wait, above which nothing more is read


@dataclass(frozen=True)
class Carried:
    """What one of the streams says; b"": it says no more."""

    number: int
    data: bytes


@dataclass
class _End:
    socket: socket.socket
    waiting: bytearray = field(default_factory=bytearray)
    finished: bool = False  # the other side says no more
    reads: bool = True  # this side may still say something


class Mux:
    """Owns the sockets, by number, one for each stream. The same code serves on both sides.

    Who does not read one of them holds up all, once some megabytes wait.
    """

    def __init__(self, stream: FrameStream[Lead | Carried, Carried], ends: Mapping[int, socket.socket]) -> None:
        self._stream = stream
        self._ends = {number: _End(end) for number, end in ends.items()}
        for end in ends.values():
            end.setblocking(False)

    def run(self) -> None:
        """Carries until the one stream ends, or all the others have on both sides."""
        try:
            self._hear()  # what came with the word to begin
            while any(end.reads or not end.finished for end in self._ends.values()) and self._step():
                pass
        except EOFError:
            pass
        finally:
            self._stream.flush()
            for end in self._ends.values():
                end.socket.close()

    def _step(self) -> bool:
        """Waits for what comes next, and carries it; False if nobody is left here and nothing comes."""
        ready = self._wait()
        for number, end in self._ends.items():
            fd = end.socket.fileno()
            if ready.get(fd, 0) & ~select.POLLOUT:
                self._read(number, end)
            self._write(end)
        if self._stream.outgoing in ready:
            self._stream.flush()
        if self._stream.incoming in ready:
            self._hear()
        return bool(ready)

    def _hear(self) -> None:
        for record, _ in self._stream.receive():
            if isinstance(record, Carried):
                self._take(self._ends[record.number], record.data)

    def _wait(self) -> dict[int, int]:
        poll = select.poll()
        if all(len(end.waiting) < _FULL for end in self._ends.values()):
            poll.register(self._stream.incoming, select.POLLIN)
        if self._stream.unsent:
            poll.register(self._stream.outgoing, select.POLLOUT)
        for end in self._ends.values():
            reads = end.reads and self._stream.unsent < _FULL
            wanted = (select.POLLIN if reads else 0) | (select.POLLOUT if end.waiting else 0)
            if wanted:
                poll.register(end.socket, wanted)
        return dict(poll.poll(None if any(end.reads for end in self._ends.values()) else 1000 * _LAST_WORDS_TIMEOUT))

    def _read(self, number: int, end: _End) -> None:
        try:
            data = end.socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if end.reads:
            self._stream.send(Carried(number, data))
        end.reads = end.reads and bool(data)

    def _take(self, end: _End, data: bytes) -> None:
        end.waiting += data
        end.finished = end.finished or not data
        self._write(end)
        if end.finished and not end.waiting:
            with contextlib.suppress(OSError):
                end.socket.shutdown(socket.SHUT_WR)

    def _write(self, end: _End) -> None:
        try:
            while end.waiting:
                del end.waiting[: end.socket.send(end.waiting)]
        except BlockingIOError:
            return
        except OSError:  # nobody hears it any more
            end.waiting.clear()
        else:
            if end.finished:
                with contextlib.suppress(OSError):
                    end.socket.shutdown(socket.SHUT_WR)
