"""The zygote: a fork server that nobody has used, stays without a caller, and forks one for each that asks.

It imports torch and serves no launch itself. Its forks take over their caller's surroundings and end with the caller,
as a fork server that the caller has started; nothing of one is there for the next. It ends by itself some time after
its last fork has, when it is asked to, when memory is short, and when a file that it has imported, or the name of its
socket, is no more what it was.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mlaunch.base import linux
from mlaunch.base.confinement import is_filtered
from mlaunch.base.fds import close_all
from mlaunch.base.peer_process import differences_to_peer, is_this_user
from mlaunch.forkserver.main import serve
from mlaunch.protocol import payload
from mlaunch.protocol.channel import Channel, assert_never
from mlaunch.protocol.server_messages import Ready
from mlaunch.warm.server.import_record import ImportRecord
from mlaunch.warm.server.loaded_files import LoadedFiles
from mlaunch.warm.server.takeover import take_over
from mlaunch.warm.wire import import_facts, zygote_place
from mlaunch.warm.wire.zygote_messages import (
    AskFork,
    AskZygote,
    Forked,
    ForkEnded,
    KeepZygote,
    NotForked,
    NotServed,
    ZygoteState,
)

if TYPE_CHECKING:
    from mlaunch.warm.wire.zygote_messages import ZygoteHears, ZygoteSays

_LOOK = 30.0  # seconds between looks at the memory of the machine


@dataclass
class _Visitor:
    """A process that has connected.

    ``refusal``: why nothing is read of what it sends; "": it is served. ``pid``: its fork; 0: it has asked for none.
    """

    channel: Channel[ZygoteHears, ZygoteSays]
    refusal: str
    pid: int = 0
    pidfd: int = -1

    def fds(self) -> list[int]:
        """Returns what can be read when there is news."""
        return [fd for fd in (self.channel.fileno(), self.pidfd) if fd >= 0]


@dataclass
class Zygote:
    """``facts``: what counted at its import; ``directory`` and ``key``: its place."""

    offered: Ready
    preload: tuple[str, ...]
    idle: float
    facts: Mapping[str, str]
    directory: Path
    key: str
    files: LoadedFiles = field(default_factory=LoadedFiles)
    record: ImportRecord = field(default_factory=ImportRecord)
    visitors: list[_Visitor] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)
    used: float = field(default_factory=time.monotonic)
    served: int = 0
    ending: bool = False

    def open(self) -> None:
        """Listens; under the lock of the place."""
        self._listener, self._inode = zygote_place.listen(self.directory, self.key)
        self._removals = linux.watch_removals(str(self.directory))

    def run(self) -> None:
        """Serves until it is to end."""
        try:
            while not self.ending and self._left() > 0:
                self._turn(linux.wait_readable(self._sources(), min(self._left(), _LOOK)))
        finally:
            zygote_place.remove(self.directory, self.key, self._inode)

    def state(self, *, facts: bool = False, refusal: str = "") -> ZygoteState:
        """Tells of itself."""
        return ZygoteState(
            pid=os.getpid(),
            preload=self.preload,
            idle=self.idle,
            left=self._left(),
            serving=sum(visitor.pidfd >= 0 for visitor in self.visitors),
            served=self.served,
            age=time.monotonic() - self.begun,
            facts=import_facts.told(self.facts) if facts else {},
            refusal=refusal,
            notes=self.record.notes(),
        )

    def _left(self) -> float:
        if any(visitor.pidfd >= 0 for visitor in self.visitors):
            return self.idle
        return self.used + self.idle - time.monotonic()

    def _sources(self) -> list[int]:
        ours = [self._listener.fileno(), *([self._removals] if self._removals >= 0 else [])]
        return ours + [fd for visitor in self.visitors for fd in visitor.fds()]

    def _turn(self, ready: list[int]) -> None:
        if not ready:
            # Half a gigabyte that nobody uses is the first thing to give back.
            self.ending = linux.memory_is_short()
        if self._removals in ready:
            linux.take_removals(self._removals)
        if not ready or self._removals in ready:
            # Without its name nobody finds it: it would stay, unseen, until its time is over.
            self.ending |= not zygote_place.is_there(self.directory, self.key, self._inode)
        for visitor in list(self.visitors):
            # The end before what was said: a visitor whose fork has ended is told that, and has nothing else to ask.
            if visitor.pidfd >= 0 and visitor.pidfd in ready:
                self._reap(visitor)
            elif visitor.channel.fileno() in ready:
                self._hear(visitor)
        if self._listener.fileno() in ready:
            self._accept()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            # The directory is this user's, but root and who has the descriptor can connect all the same.
            if is_this_user(connection):
                # Before anything is read: the user's number says nothing of a container, or of a sandbox.
                self.visitors.append(_Visitor(Channel(connection), self._why_not(connection)))
            else:
                connection.close()

    def _why_not(self, connection: socket.socket) -> str:
        """Return why who has connected is not served; "": he is."""
        if differences := differences_to_peer(connection, self.facts):
            return differences
        # Of two that have these, one may be in a Landlock domain, or have another filter: no file in /proc says so.
        if is_filtered(self.facts) and not import_facts.shares_sandbox(os.environ):
            return f"it has no_new_privs or a seccomp filter, and {import_facts.SANDBOX}=1 is not set"
        return ""

    def _hear(self, visitor: _Visitor) -> None:
        try:
            if visitor.refusal:
                self._refuse(visitor)
                return
            record, fds = visitor.channel.receive()
        except (EOFError, OSError):
            self._lose(visitor)
            return
        match record:
            case AskFork():
                self._fork(visitor, record, fds)
            case KeepZygote():
                self.idle, self.used = record.seconds, time.monotonic()
                visitor.channel.try_send(self.state(facts=False))
            case AskZygote():
                refusal = self.files.changed() or self._refusal(record) if record.facts else ""
                visitor.channel.try_send(self.state(facts=record.facts, refusal=refusal))
            case _:
                assert_never(record)

    def _refuse(self, visitor: _Visitor) -> None:
        # Taken from the queue and not looked at, nor the descriptors beside it.
        if os.read(visitor.channel.fileno(), 1):
            visitor.channel.try_send(NotServed(visitor.refusal, self.state(facts=True)))
        self._lose(visitor)

    def _lose(self, visitor: _Visitor) -> None:
        """Takes in that somebody is gone. A fork that was stopped hears it, too, once it goes on."""
        visitor.channel.close()
        if visitor.pidfd >= 0:
            signal.pidfd_send_signal(visitor.pidfd, signal.SIGCONT)
        else:
            self.visitors.remove(visitor)

    def _reap(self, visitor: _Visitor) -> None:
        _, status = os.waitpid(visitor.pid, 0)
        if visitor.channel.fileno() >= 0:
            visitor.channel.try_send(ForkEnded(os.waitstatus_to_exitcode(status)))
            visitor.channel.close()
        os.close(visitor.pidfd)
        self.visitors.remove(visitor)
        self.used = time.monotonic()

    def _fork(self, visitor: _Visitor, asked: AskFork, fds: list[int]) -> None:
        try:
            refusal = self.files.changed()
            # Not imported anew: half of a new version would be there, beside half of the old one.
            self.ending = bool(refusal)
            refusal = refusal or self._refusal(asked)
            # A server for each caller, not an agent: a fork server has state (late imports, what is prepared,
            # descriptors), of which nothing may be there for the next caller.
            pid = 0 if refusal else os.fork()
        except OSError as error:
            refusal = str(error)
        if refusal:
            visitor.channel.try_send(NotForked(refusal, self.ending))
            close_all(fds)
            return
        if pid == 0:
            self._become_server(asked, fds)
        close_all(fds)
        visitor.pid, visitor.pidfd = pid, os.pidfd_open(pid)
        self.served += 1
        # A fork cannot be the caller's child, so the caller gets a pidfd to watch it by; how it ended comes over this
        # channel.
        visitor.channel.try_send(Forked(pid), [visitor.pidfd])

    def _refusal(self, asked: AskFork | AskZygote) -> str:
        """Says why it has no fork that would do; "" if it has."""
        return self.record.why_others(asked.variables) or self.files.why_others(asked.path)

    def _become_server(self, asked: AskFork, fds: list[int]) -> NoReturn:
        try:
            for visitor in self.visitors:
                close_all(visitor.fds())
            close_all([self._listener.detach(), *([self._removals] if self._removals >= 0 else [])])
            memfd, control, caller_fd, stdin, stderr = fds
            caller = payload.read(memfd)
            os.close(memfd)
            take_over(caller, asked.path, stdin, stderr)
        except BaseException:
            os._exit(1)
        serve(Channel.adopt(control), caller.caller, None, asked.preload, self.offered, caller_fd)
