"""A socket pair that carries whole records and file descriptors between processes of one machine and user."""

from __future__ import annotations

import array
import dataclasses
import errno
import os
import pickle
import socket
from collections.abc import Iterable, Sequence
from typing import Generic, NoReturn, TypeVar

from mlaunch.base import linux
from mlaunch.base.frozen_record import read_shapes

Incoming = TypeVar("Incoming")  # the records that come from the other end: see messages.py
Outgoing = TypeVar("Outgoing", contravariant=True)  # the records that the other end takes

RECORD_LIMIT = 65_536  # bytes: a record is small by design, and what can grow goes in a memfd beside it
TEXT_LIMIT = 32_768  # bytes of UTF-8 that a text in a record may have, so that the record stays below its limit
FD_LIMIT = 8  # descriptors beside a record
_NOT_OURS = "other code in this process has closed the channel's descriptor"
_ROOM = socket.CMSG_LEN(FD_LIMIT * array.array("i").itemsize)
_CLOSE_ON_EXEC, _LESS_CAME, _FDS_LACK = map(int, (socket.MSG_CMSG_CLOEXEC, socket.MSG_TRUNC, socket.MSG_CTRUNC))


def get_to_know(kinds: Iterable[object]) -> None:
    """Prepare pickle for these record classes, so that forks of this process need not at their first record.

    Pickle caches the slots of each class among ``kinds``, which changes the class. That takes a newly forked process a
    quarter of a millisecond.
    """
    read_shapes()
    for kind in kinds:
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            kind.__new__(kind).__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def assert_never(record: NoReturn) -> NoReturn:
    """Make a type checker report a kind of record that a receiver does not handle.

    ``typing`` has it from Python 3.11 on.
    """
    raise AssertionError(f"no receiver takes this record: {record!r}")


def pickled(record: object) -> bytes:
    """Return a record as it is sent. ValueError if a receiver could not take it whole."""
    data = pickle.dumps(record)
    if len(data) > RECORD_LIMIT:
        kind = type(record).__name__
        raise ValueError(f"a {kind} of {len(data)} bytes; a record holds {RECORD_LIMIT}: its texts must be bounded")
    return data


class Channel(Generic[Incoming, Outgoing]):
    """One end of a socket pair. SOCK_SEQPACKET keeps records whole, so a reader never sees half of one."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._identity = linux.identity(end.fileno())

    @classmethod
    def pair(cls) -> tuple[Channel[Incoming, Outgoing], Channel[Outgoing, Incoming]]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A process whose standard streams are closed would get their numbers, and print into a channel.
        return cls.adopt(linux.above_standard(ours.detach())), Channel.adopt(linux.above_standard(theirs.detach()))

    @classmethod
    def adopt(cls, fd: int) -> Channel[Incoming, Outgoing]:
        """Take over a file descriptor that was inherited or received."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    def intact(self) -> bool:
        """True if the descriptor is still this channel's. Other code may have closed it and opened a file."""
        return linux.identity(self._socket.fileno()) == self._identity

    def send(self, record: Outgoing, fds: Sequence[int] = ()) -> None:
        """Send a record, and duplicates of file descriptors.

        Raises:
            BrokenPipeError, ConnectionResetError: The other end is gone, or this end now belongs to other code.
            ValueError: The record is too large for a receiver to take it whole.
        """
        data = pickled(record)
        if not self.intact():
            raise BrokenPipeError(errno.EPIPE, _NOT_OURS)
        socket.send_fds(self._socket, [data], fds)

    def try_send(self, record: Outgoing, fds: Sequence[int] = ()) -> None:
        """Send as ``send`` does, but ignore that the other end is gone."""
        data = pickled(record)
        if self.intact():
            self.try_send_pickled(data, fds)

    def try_send_pickled(self, record: bytes, fds: Sequence[int] = ()) -> None:
        """Send a record that ``pickled`` has made, for one record to several channels.

        Ignore that the other end is gone.
        """
        try:
            if fds:
                socket.send_fds(self._socket, [record], fds)
            else:
                self._socket.send(record)
        except OSError:
            return

    def receive(self) -> tuple[Incoming, list[int]]:
        """Return the next record and its file descriptors, which the receiver then owns.

        Raises:
            EOFError: The other end is gone, or this end now belongs to other code, whose data is not unpickled.
            OSError: The record was cut: EMFILE if file descriptors are lacking, EMSGSIZE if the record was too large.
        """
        if not self.intact():
            raise EOFError(_NOT_OURS)
        try:
            data, fds, flags = self._take()
        except ConnectionResetError:  # told once, if it went without reading our last: its own may still be there
            data, fds, flags = self._take()
        if not data:
            raise EOFError("the other end of the channel is closed")
        # If there is no room for a record's end or its descriptors, the kernel drops them without an error.
        if flags & (_LESS_CAME | _FDS_LACK):
            for fd in fds:
                os.close(fd)
            if flags & _LESS_CAME:
                raise OSError(errno.EMSGSIZE, f"a record of more than {RECORD_LIMIT} bytes came, and was cut")
            raise OSError(errno.EMFILE, "no file descriptor is left to receive a rank's answer with (see ulimit -n)")
        return pickle.loads(data), fds

    def hear(self) -> tuple[Incoming | None, list[int]]:
        """Return what ``receive`` does; at the end of the stream, None in place of a record."""
        try:
            return self.receive()
        except EOFError:
            return None, []

    def _take(self) -> tuple[bytes, list[int], int]:
        """Return what ``socket.recv_fds`` does, and the flags, which that ignores."""
        data, beside, flags, _ = self._socket.recvmsg(RECORD_LIMIT, _ROOM, _CLOSE_ON_EXEC)
        if not beside:
            return data, [], flags
        fds = array.array("i")
        for _, _, found in beside:
            # A message that was cut may end in the middle of a descriptor's number.
            fds.frombytes(found[: len(found) - len(found) % fds.itemsize])
        return data, fds.tolist(), flags

    def peek(self) -> Incoming:
        """Return the next record without its descriptors, and leave it in the socket. EOFError as for ``receive``."""
        if not self.intact():
            raise EOFError(_NOT_OURS)
        data = self._socket.recv(RECORD_LIMIT, socket.MSG_PEEK)
        if not data:
            raise EOFError("the other end of the channel is closed")
        record: Incoming = pickle.loads(data)
        return record

    def close(self) -> None:
        """Close the descriptor, unless it now belongs to other code."""
        if self._socket.fileno() >= 0 and not self.intact():
            # Not closed: the number now belongs to a file of other code.
            self._socket.detach()
        self._socket.close()
