"""Where those come who ask what a running launch is doing: a socket, one word from each, one JSON object in return."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Collection, Mapping
from typing import Any

from mlaunch.base.peer_process import is_this_user, peer_process, rights_lacking_to_peer
from mlaunch.features import FEATURES, with_hook
from mlaunch.protocol import registry
from mlaunch.protocol.messages import AgentsEnd, Told

STATUS = b"status"
END = b"end"  # at once
ASK = b"ask "  # with a feature's name: its part in the agent is to do what it does; who asks waits for the call's end
VISIT = b"visit "  # with a feature's name and a word for it: its part in the agent gets the connection, to keep
_WORDS = {STATUS, END} | {word for one in FEATURES for word in one.words}
_WORD_LIMIT = 64
_MOST_VISITORS = 32  # who have said nothing yet

_NOT_FROM_THERE = (
    "the launch does not do that for process {}: {}. So a sandbox or container cannot act outside of itself; run the "
    "command where the launch was started"
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
        self._stoppers: list[socket.socket] = []  # those who wait for the end
        self.stopped_by: int | None = None  # the process that has asked the launch to end at once
        self._request: tuple[str, int] | None = None  # what a feature is asked to do, and the process that asks
        self._guests: list[tuple[socket.socket, str, str]] = []  # those who come to a feature, and its word
        self._listener: socket.socket | None = None

    def open(self) -> None:
        """Begin to listen, if there is a place for it."""
        with contextlib.suppress(OSError):  # a full disk, a directory that is not ours: a launch needs no visitors
            self._listener = registry.listen(self._environ, self._name)

    def close(self) -> None:
        """Let go of all who have come, and can be found no more; a fork of the owner lets go alone."""
        for visitor in [*self._visitors.values(), *self._stoppers, *(guest for guest, *_ in self._guests)]:
            visitor.close()
        if self._listener is not None:
            self._listener.close()
        if self._listener is not None and self._owner == os.getpid():
            registry.remove(self._environ, self._name)
        self._visitors, self._stoppers, self._listener = {}, [], None

    def fds(self) -> list[int]:
        """Return what is to be watched."""
        return [*([] if self._listener is None else [self._listener.fileno()]), *self._visitors]

    def take(self, ready: Collection[int]) -> list[tuple[socket.socket, bytes]]:
        """Return who wants to know what; those who said nothing that we know are sent away.

        Who asks the launch to end is noted, and hears of its end by ours.
        """
        visitors = [self._visitors.pop(fd) for fd in self._visitors.keys() & set(ready)]
        heard = [(visitor, _word_of(visitor)) for visitor in visitors]
        if self._listener is not None and self._listener.fileno() in ready:  # last: who comes may get a ready number
            self._welcome(self._listener)
        return [(visitor, word) for visitor, word in heard if not self._settles(visitor, word)]

    def _settles(self, visitor: socket.socket, word: bytes) -> bool:
        """Do what needs nobody else: send a visitor away, or keep one who waits for the end; False for questions."""
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
        # Kept open: that its connection closes is how whoever waits hears of the end, even if this process is killed.
        self._stoppers.append(visitor)
        if word == END:
            self.stopped_by = pid_of(visitor)
        else:
            self._request = word.removeprefix(ASK).decode(), pid_of(visitor)

    @property
    def asked_by(self) -> int | None:
        """The process that has asked a feature for something; None: none has, or ``take_request`` has returned it."""
        return None if self._request is None else self._request[1]

    def take_request(self) -> tuple[str, int] | None:
        """Return which feature is asked, and by which process, once; None: none is."""
        request, self._request = self._request, None
        return request

    def take_guests(self) -> list[tuple[socket.socket, str, str]]:
        """Return who has come to a feature, with its name and what was said to it, once."""
        guests, self._guests = self._guests, []
        return guests

    def let_stoppers_go(self) -> None:
        """Tell those who wait for the end that it has come, as far as they asked for it."""
        for visitor in self._stoppers:
            visitor.close()
        self._stoppers = []

    def _welcome(self, listener: socket.socket) -> None:
        """Accept a visitor. Too many that say nothing make way, the oldest first: the listener would stay readable."""
        try:
            visitor, _ = listener.accept()
        except BlockingIOError:  # who came has left
            return
        except OSError:  # no descriptor is free
            self._dismiss_oldest()
            return
        if not is_this_user(visitor):  # the directory's mode may count for nothing: it was changed, or is not kept
            visitor.close()
            return
        if len(self._visitors) >= _MOST_VISITORS:
            self._dismiss_oldest()
        self._visitors[visitor.fileno()] = visitor

    def _dismiss_oldest(self) -> None:
        if self._visitors:
            self._visitors.pop(next(iter(self._visitors))).close()
        else:  # nobody can be heard from now on
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
    """Give a visitor what was asked for, and says farewell."""
    with contextlib.suppress(OSError), visitor:
        send(visitor, status)


def send(visitor: socket.socket, status: Mapping[str, Any]) -> None:
    """Give a visitor what was asked for. OSError: it is gone."""
    memfd = in_memory(status)
    try:
        socket.send_fds(visitor, [b"."], [memfd])
    finally:
        os.close(memfd)


def tell_launcher(launcher: AgentsEnd, number: int, status: Mapping[str, Any]) -> None:
    """Give the launch's own caller what it has asked for by a Question."""
    memfd = in_memory(status)
    try:
        launcher.try_send(Told(number), [memfd])
    finally:
        os.close(memfd)


def in_memory(status: Mapping[str, Any]) -> int:
    """Return a memory file with the status in JSON."""
    memfd = os.memfd_create("mlaunch-status", os.MFD_CLOEXEC)
    with open(memfd, "w", encoding="utf-8", closefd=False) as file:
        # JSON, so that one version's command can ask another's launch.
        file.write(json.dumps(status))  # json.dump leaves a cycle each time
    return memfd


def read_status(memfd: int) -> dict[str, Any]:
    """Read one, and closes it."""
    with open(memfd, encoding="utf-8") as file:
        file.seek(0)
        status: dict[str, Any] = json.load(file)
        return status


def ask(connection: socket.socket, word: bytes, timeout: float | None) -> dict[str, Any] | None:
    """Ask a launch, as who has come; None: it has ended meanwhile, or does not answer within these seconds."""
    connection.settimeout(timeout)
    with contextlib.suppress(TimeoutError, ConnectionError, BrokenPipeError):
        connection.send(word)
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
        if fds:
            return read_status(fds[0])
    return None  # it ended while we asked
