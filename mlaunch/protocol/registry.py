"""The registry of a user's running launches: a directory of that user only, with a socket for each launch.

At its socket, a launch answers processes that ask what it is doing: one word from each, one JSON object in return.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlaunch.base.own_files import is_own_directory
from mlaunch.base.peer_process import is_this_user, peer_process, rights_lacking_to_peer
from mlaunch.features import FEATURES, with_hook
from mlaunch.protocol.messages import AgentsEnd, Told

_SUFFIX = ".sock"
_UNFINISHED = ".new"
_MOMENT = 60  # seconds
_BACKLOG = 16


def candidates(environ: Mapping[str, str]) -> list[Path]:
    """Return the directories that a launch of this user may have chosen, the one for ``environ`` first.

    A notebook server may run with other variables than the shell in which its user looks for it. For the same reason
    the last is a fixed place, not the current temporary directory, which jobs change.
    """
    uid = os.getuid()
    chosen = [Path(environ["XDG_RUNTIME_DIR"])] if environ.get("XDG_RUNTIME_DIR") else []
    usual = [Path(f"/run/user/{uid}/mlaunch"), Path(f"/tmp/mlaunch-{uid}")]
    return list(dict.fromkeys([*(path / "mlaunch" for path in chosen), *usual]))


def home(environ: Mapping[str, str]) -> Path:
    """Return the directory in which a launch with ``environ`` puts its socket."""
    if environ.get("XDG_RUNTIME_DIR"):
        return candidates(environ)[0]
    # The directory of the login if there is one: in /tmp another user may have made the directory first.
    usual, fixed = candidates(environ)[-2:]
    return usual if is_own_directory(usual.parent) else fixed


def name_of(launch_id: str, rank_start: int) -> str:
    """Return the name of a machine's part of a launch, whose other parts may be on the same host."""
    return f"{launch_id}-{rank_start}" if rank_start else launch_id


def listen(environ: Mapping[str, str], launch_id: str) -> socket.socket:
    """Make a listening socket for this launch. OSError if that is impossible: a launch continues without one."""
    directory = home(environ)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    with opened(directory) as place:
        unfinished, finished = _path(place, launch_id, _UNFINISHED), _path(place, launch_id, _SUFFIX)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # A process that finds a socket on which nobody listens takes it for a leftover, and removes it.
            listener.bind(unfinished)
            try:
                listener.listen(_BACKLOG)
                os.link(unfinished, finished)  # a rename would replace what is there
            finally:
                os.unlink(unfinished)
        except OSError:
            listener.close()
            raise
    listener.setblocking(False)
    return listener


def remove(environ: Mapping[str, str], launch_id: str) -> None:
    """Remove the launch's sockets, if any, also an unfinished one, unless a process listens on them."""
    for suffix in (_SUFFIX, _UNFINISHED):
        with contextlib.suppress(OSError), opened(home(environ)) as place:
            _remove_if_dead(_path(place, launch_id, suffix))


def connect(environ: Mapping[str, str], launch_id: str) -> socket.socket | None:
    """Return a socket that is connected to this launch; None if it does not listen, or its queue is full."""
    with contextlib.suppress(OSError), opened(home(environ)) as place:
        return _connect(_path(place, launch_id, _SUFFIX))
    return None


def reach(environ: Mapping[str, str], name: str, patience: int) -> socket.socket | None:
    """Return a socket that is connected to the launch of this name, in any directory; None as for ``connect``.

    ``patience``: seconds to wait for others in its queue.
    """
    for directory in candidates(environ):
        with contextlib.suppress(OSError), opened(directory) as place:
            if (connection := _connect(_path(place, name, _SUFFIX), patience)) is not None:
                return connection
    return None


def _path(place: str, launch_id: str, suffix: str) -> str:
    """Return the path of a launch's socket. OSError for an id that leads to another directory."""
    if os.path.basename(launch_id) != launch_id:
        raise OSError(errno.EINVAL, "no launch has such an id", launch_id)
    return f"{place}/{launch_id}{suffix}"


def connections(environ: Mapping[str, str], patience: int = 0) -> Iterator[tuple[str, socket.socket]]:
    """Yield (id, connected socket) of every running launch. Remove sockets that a killed launch left behind.

    A launch with many visitors is left out if it has not accepted some of them after ``patience`` seconds.
    """
    for directory in candidates(environ):
        try:
            with opened(directory) as place:
                for name in sorted(os.listdir(place)):
                    connection = _connect(f"{place}/{name}", patience) if name.endswith(_SUFFIX) else None
                    if connection is not None:
                        yield name.removesuffix(_SUFFIX), connection
                    elif name.endswith(_UNFINISHED):
                        _remove_if_old(f"{place}/{name}")
        except FileNotFoundError:
            continue
        except OSError:  # another user's, without launches of this user; but it may be the place for this environment
            if directory == home(environ):
                raise


def _remove_if_dead(path: str) -> None:
    connection = _connect(path)
    if connection is not None:
        connection.close()


def _remove_if_old(path: str) -> None:
    """Remove the socket of a launch that was killed before it could listen."""
    with contextlib.suppress(FileNotFoundError):
        if time.time() - os.lstat(path).st_mtime > _MOMENT:
            os.unlink(path)


def _connect(path: str, patience: int = 0) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(patience > 0)
    # The kernel's own timeout: with one of Python's, a full queue fails at once.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", patience, 0))
    try:
        connection.connect(path)
    except ConnectionRefusedError:  # its owner ended without removing it
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode):  # a file of another kind refuses, too
                os.unlink(path)
    except (FileNotFoundError, BlockingIOError):  # it ended just now; its queue is full, or has been for too long
        pass
    else:
        connection.setblocking(True)
        return connection
    connection.close()
    return None


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[str]:
    """Yield a short path to the directory; PermissionError unless it belongs to this user only.

    The path of a socket may have 107 bytes.
    """
    with opened_fd(directory) as fd:
        yield f"/proc/self/fd/{fd}"


@contextlib.contextmanager
def opened_fd(directory: Path) -> Iterator[int]:
    """Yield a descriptor of the directory; errors as for ``opened``."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(
                f"{directory} must belong to this user with mode 0700, but it belongs to uid {status.st_uid} with mode "
                f"{stat.S_IMODE(status.st_mode):04o}; set XDG_RUNTIME_DIR to a directory of yours, or remove it"
            )
        yield fd
    finally:
        os.close(fd)


# What a launch answers at its socket

STATUS = b"status"
END = b"end"  # at once
ASK = b"ask "  # with a feature's name: its part in the agent must act; the visitor waits for the call's end
VISIT = b"visit "  # with a feature's name and a word for it: its part in the agent gets the connection, to keep
_WORDS = {STATUS, END} | {word for one in FEATURES for word in one.words}
_WORD_LIMIT = 64
_MOST_VISITORS = 32  # that have said nothing yet

_NOT_FROM_THERE = (
    "the launch refuses this to process {}: {}. A sandbox or container must not act outside of itself; run the command "
    "where the launch was started"
)


class Reception:
    """The listening end of one launch, by its name in the registry.

    Nothing that a visitor does, or fails to do, holds up the launch.
    """

    def __init__(self, environ: Mapping[str, str], name: str) -> None:
        self._environ = environ
        self._name = name
        self._owner = os.getpid()
        self._visitors: dict[int, socket.socket] = {}
        self._stoppers: list[socket.socket] = []  # visitors that wait for the end
        self.stopped_by: int | None = None  # the process that has asked the launch to end at once
        self._request: tuple[str, int] | None = None  # what a feature is asked to do, and the process that asks
        self._guests: list[tuple[socket.socket, str, str]] = []  # visitors to features, with name and word
        self._listener: socket.socket | None = None

    def open(self) -> None:
        """Begin to listen, if there is a place for it."""
        with contextlib.suppress(OSError):  # a full disk, a directory of another user: a launch does not need visitors
            self._listener = listen(self._environ, self._name)

    def close(self) -> None:
        """Close all connections and remove the socket. A fork of the owner only closes its own descriptors."""
        for visitor in [*self._visitors.values(), *self._stoppers, *(guest for guest, *_ in self._guests)]:
            visitor.close()
        if self._listener is not None:
            self._listener.close()
        if self._listener is not None and self._owner == os.getpid():
            remove(self._environ, self._name)
        self._visitors, self._stoppers, self._listener = {}, [], None

    def fds(self) -> list[int]:
        """Return the descriptors to watch."""
        return [*([] if self._listener is None else [self._listener.fileno()]), *self._visitors]

    def take(self, ready: Collection[int]) -> list[tuple[socket.socket, bytes]]:
        """Return the visitors with questions, and their words. Send visitors with an unknown word away.

        A visitor that asks the launch to end is noted, and learns of the end when its connection closes.
        """
        visitors = [self._visitors.pop(fd) for fd in self._visitors.keys() & set(ready)]
        heard = [(visitor, _word_of(visitor)) for visitor in visitors]
        if self._listener is not None and self._listener.fileno() in ready:  # last: a visitor may get a ready number
            self._welcome(self._listener)
        return [(visitor, word) for visitor, word in heard if not self._settles(visitor, word)]

    def _settles(self, visitor: socket.socket, word: bytes) -> bool:
        """Handle a visitor that needs no other part: send it away, or keep it until the end. False for questions."""
        if not word:
            visitor.close()
        elif word.startswith((END, ASK, VISIT)) and (lacking := rights_lacking_to_peer(visitor)):
            answer(visitor, {"refused": _NOT_FROM_THERE.format(pid_of(visitor), lacking)})
        elif word.startswith(VISIT):
            feature, _, said = word.removeprefix(VISIT).decode().partition(" ")
            self._guests.append((visitor, feature, said))
        elif word == END or word.startswith(ASK):
            self._take_stopper(visitor, word)
        else:
            return False
        return True

    def _take_stopper(self, visitor: socket.socket, word: bytes) -> None:
        # Kept open: the visitor learns of the end when its connection closes, even if this process is killed.
        self._stoppers.append(visitor)
        if word == END:
            self.stopped_by = pid_of(visitor)
        else:
            self._request = word.removeprefix(ASK).decode(), pid_of(visitor)

    @property
    def asked_by(self) -> int | None:
        """Return the process that has asked a feature to act; None if none has, or ``take_request`` has returned it."""
        return None if self._request is None else self._request[1]

    def take_request(self) -> tuple[str, int] | None:
        """Return, once, which feature is asked to act, and by which process; None if none is."""
        request, self._request = self._request, None
        return request

    def take_guests(self) -> list[tuple[socket.socket, str, str]]:
        """Return, once, the visitors to features, each with the feature's name and the word for it."""
        guests, self._guests = self._guests, []
        return guests

    def let_stoppers_go(self) -> None:
        """Close the connections of the visitors that wait for the end, which tells them that it has come."""
        for visitor in self._stoppers:
            visitor.close()
        self._stoppers = []

    def _welcome(self, listener: socket.socket) -> None:
        """Accept a visitor. If too many say nothing, drop the oldest: otherwise the listener would stay readable."""
        try:
            visitor, _ = listener.accept()
        except BlockingIOError:  # the visitor has left
            return
        except OSError:  # no descriptor is free
            self._dismiss_oldest()
            return
        if not is_this_user(visitor):  # the directory's mode may have been changed, or may not be kept
            visitor.close()
            return
        if len(self._visitors) >= _MOST_VISITORS:
            self._dismiss_oldest()
        self._visitors[visitor.fileno()] = visitor

    def _dismiss_oldest(self) -> None:
        if self._visitors:
            self._visitors.pop(next(iter(self._visitors))).close()
        else:  # no visitor can be accepted from now on
            self.close()


def _word_of(visitor: socket.socket) -> bytes:
    with contextlib.suppress(OSError):
        word = visitor.recv(_WORD_LIMIT)
        asked, _, said = word.removeprefix(ASK).removeprefix(VISIT).partition(b" ")
        hook = (
            "agent.welcome" if word.startswith(VISIT) else "agent.visited" if word.startswith(ASK) and not said else ""
        )
        is_known = asked in {one.name.encode() for one in with_hook(hook)}
        return word if word in _WORDS or (is_known and word.isascii()) else b""
    return b""


def pid_of(visitor: socket.socket) -> int:
    """Return the process that has connected; 0 if it is of another namespace."""
    return peer_process(visitor)[0]


def answer(visitor: socket.socket, status: Mapping[str, Any]) -> None:
    """Send a visitor what it asked for, and close the connection."""
    with contextlib.suppress(OSError), visitor:
        send(visitor, status)


def send(visitor: socket.socket, status: Mapping[str, Any]) -> None:
    """Send a visitor what it asked for. OSError if it is gone."""
    memfd = in_memory(status)
    try:
        socket.send_fds(visitor, [b"."], [memfd])
    finally:
        os.close(memfd)


def tell_launcher(launcher: AgentsEnd, number: int, status: Mapping[str, Any]) -> None:
    """Send the launch's own caller what it asked for by a Question."""
    memfd = in_memory(status)
    try:
        launcher.try_send(Told(number), [memfd])
    finally:
        os.close(memfd)


def in_memory(status: Mapping[str, Any]) -> int:
    """Return a memory file with the status in JSON."""
    memfd = os.memfd_create("mlaunch-status", os.MFD_CLOEXEC)
    with open(memfd, "w", encoding="utf-8", closefd=False) as file:
        # JSON, so that one version's command can ask another version's launch.
        file.write(json.dumps(status))  # json.dump leaves a cycle each time
    return memfd


def read_status(memfd: int) -> dict[str, Any]:
    """Return the status in a memory file, and close the file."""
    with open(memfd, encoding="utf-8") as file:
        file.seek(0)
        status: dict[str, Any] = json.load(file)
        return status


def ask(connection: socket.socket, word: bytes, timeout: float | None) -> dict[str, Any] | None:
    """Ask a launch, as a visitor; return None if it has ended, or does not answer within ``timeout`` seconds."""
    connection.settimeout(timeout)
    with contextlib.suppress(TimeoutError, ConnectionError, BrokenPipeError):
        connection.send(word)
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
        if fds:
            return read_status(fds[0])
    return None  # it ended after it was asked
