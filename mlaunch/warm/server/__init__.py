"""The zygote: an unused fork server without a caller, which forks one for each caller that asks.

It imports torch and serves no launch itself. Its forks take over their caller's surroundings and end with the caller,
like a fork server that the caller has started; they leave nothing for the next. It ends some time after its last fork
has ended, on request, when memory is short, and when a file that it has imported, or the name of its socket, has
changed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mlaunch.base import linux
from mlaunch.base.fds import close_all
from mlaunch.base.own_process import name_process
from mlaunch.base.peer_process import differences_to_peer, is_filtered, is_this_user
from mlaunch.base.text import both_ends
from mlaunch.core import load
from mlaunch.forkserver import imports
from mlaunch.forkserver.main import serve
from mlaunch.protocol import payload, settings
from mlaunch.protocol.channel import Channel, assert_never
from mlaunch.protocol.server_messages import NotReady, Ready
from mlaunch.rank import device, process
from mlaunch.warm.server.import_record import ImportRecord, LoadedFiles
from mlaunch.warm.wire import import_facts, zygote_place
from mlaunch.warm.wire.zygote_messages import (
    AskFork,
    AskZygote,
    CallersProcess,
    Forked,
    ForkEnded,
    KeepZygote,
    NotForked,
    NotServed,
    ZygoteState,
)

if TYPE_CHECKING:
    from mlaunch.warm.wire.zygote_messages import ZygoteHears, ZygoteSays


_STDIN = 0  # a file with the variables that the imports may read, and nothing after them
_REASON = 8192  # bytes of a traceback that a person is shown
_CHECK = 30.0  # seconds between checks of the machine's memory
_PYTHONS = {signal.SIGPIPE, signal.SIGXFSZ}  # each interpreter ignores these
_KEY_SIZE = 32  # bytes of multiprocessing's key


# The start


def main(word_fd: int, lock_fd: int, directory: str, idle: float, preload: Sequence[str], *, awaited: bool) -> NoReturn:
    """Run a zygote in a fresh interpreter.

    ``lock_fd``: the lock of its place, until it listens. ``awaited``: its starter waits for the report that it is
    ready; it ends if the starter has left.
    """
    if os.fork() > 0:
        os._exit(0)  # the starter waits for its child
    linux.open_standard_streams()
    code = 1
    try:
        name_process("warm fork server")
        os.chdir("/")
        for number in (signal.SIGTERM, signal.SIGHUP):  # at a logout, or on request
            signal.signal(number, lambda *_: sys.exit(0))
        word: Channel[ZygoteHears, ZygoteSays] = Channel.adopt(word_fd)
        zygote = _import(Path(directory), idle, tuple(preload), word)
        if zygote is not None:
            zygote.open()
            # One that was left at its starter's exit has nobody to report to.
            zygote.ending = not _tell(word, zygote) and awaited
            word.close()
            # Only now that it listens: a process that waits for the lock finds it, and starts no second one.
            os.close(lock_fd)
            linux.leave_standard_streams()
            zygote.run()
        code = 0
    except OSError as error:
        word.try_send(NotReady(str(error)))
    finally:
        os._exit(code)


def _usual() -> tuple[str, ...]:
    """Return the modules that ranks of functions and of scripts import."""
    return ("mlaunch.caller.launcher", *(["mlaunch.run.rank"] if load.is_there("run") else []))


def _import(
    directory: Path, idle: float, preload: tuple[str, ...], word: Channel[ZygoteHears, ZygoteSays]
) -> Zygote | None:
    """Import all; None, with a report, if an import fails, or leaves something behind that no fork may have."""
    if sys.path[:1] == [""]:
        del sys.path[0]  # the working directory
    # Before the imports, since libraries change variables as they are loaded.
    facts, record = import_facts.of_this_process(os.environ), ImportRecord()
    try:
        with record.reading():
            offered, asked = imports.load(_usual())
        imports.finish(asked, collect=False)
        with _with_variables(payload.read(_STDIN)), record.reading(), record.drawing():
            imports.load_for_user(preload)
    except (device.TooOldError, imports.PreloadError) as error:
        word.try_send(NotReady(str(error)))
        return None
    except ModuleNotFoundError as error:
        lacks = next((name for name in preload if error.name in {name, name.partition(".")[0]}), None)
        at_all = f"--preload {lacks}: there is no module of this name in {sys.prefix}"
        word.try_send(NotReady(at_all if lacks else both_ends(traceback.format_exc(), _REASON)))
        return None
    except (Exception, SystemExit):
        word.try_send(NotReady(both_ends(traceback.format_exc(), _REASON)))
        return None
    gc.collect()
    imports.share()
    imports.settle()  # once for all forks
    files = LoadedFiles(record.missed)
    return Zygote(offered, preload, idle, facts, directory, import_facts.key_of(facts), files, record)


@contextlib.contextmanager
def _with_variables(rest: Mapping[str, str]) -> Iterator[None]:
    """Set the starter's variables while modules are imported that may read them, and remove them afterwards."""
    os.environ.update(rest)
    try:
        yield
    finally:
        for name in rest:
            os.environ.pop(name, None)


def _tell(word: Channel[ZygoteHears, ZygoteSays], zygote: Zygote) -> bool:
    """Report that it is ready; False if the starter is gone."""
    try:
        word.send(zygote.state())
    except OSError:
        return False
    return True


# Serving


@dataclass
class _Visitor:
    """A process that has connected.

    ``refusal``: why nothing that it sends is read; "": it is served. ``pid``: its fork; 0: it has none.
    """

    channel: Channel[ZygoteHears, ZygoteSays]
    refusal: str
    pid: int = 0
    pidfd: int = -1

    def fds(self) -> list[int]:
        """Return descriptors that can be read when there is news."""
        return [fd for fd in (self.channel.fileno(), self.pidfd) if fd >= 0]


@dataclass
class Zygote:
    """The zygote. ``facts``: those at its import; ``directory`` and ``key``: the place of its socket."""

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
        """Listen. Called under the lock of the place."""
        self._listener, self._inode = zygote_place.listen(self.directory, self.key)
        self._removals = linux.watch_removals(str(self.directory))

    def run(self) -> None:
        """Serve until it is to end."""
        try:
            while not self.ending and self._left() > 0:
                self._turn(linux.wait_readable(self._sources(), min(self._left(), _CHECK)))
        finally:
            zygote_place.remove(self.directory, self.key, self._inode)

    def state(self, *, facts: bool = False, refusal: str = "") -> ZygoteState:
        """Return its state."""
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
            # An idle zygote may hold half a gigabyte: it ends if memory is short.
            self.ending = linux.memory_is_short()
        if self._removals in ready:
            linux.take_removals(self._removals)
        if not ready or self._removals in ready:
            # Without its name, it cannot be found, and would stay until its time is over.
            self.ending |= not zygote_place.is_there(self.directory, self.key, self._inode)
        for visitor in list(self.visitors):
            # The fork's end first: then its visitor has nothing else to ask.
            if visitor.pidfd >= 0 and visitor.pidfd in ready:
                self._reap(visitor)
            elif visitor.channel.fileno() in ready:
                self._hear(visitor)
        if self._listener.fileno() in ready:
            self._accept()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            # The directory is this user's, but root can connect, and a process that has its descriptor.
            if is_this_user(connection):
                # Before anything is read: the user's number does not show a container or a sandbox.
                self.visitors.append(_Visitor(Channel(connection), self._why_not(connection)))
            else:
                connection.close()

    def _why_not(self, connection: socket.socket) -> str:
        """Return why the process that has connected is not served; "": it is."""
        if differences := differences_to_peer(connection, self.facts):
            return differences
        # Of two processes with these, one may be in a Landlock domain, or have another filter: /proc does not show it.
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
        # One byte takes the record from the queue, unread, without its descriptors.
        if os.read(visitor.channel.fileno(), 1):
            visitor.channel.try_send(NotServed(visitor.refusal, self.state(facts=True)))
        self._lose(visitor)

    def _lose(self, visitor: _Visitor) -> None:
        """Drop a visitor that is gone. Its fork, which may be stopped, is continued to notice it."""
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
            # Not reloaded: half of a new version would be beside half of the old one.
            self.ending = bool(refusal)
            refusal = refusal or self._refusal(asked)
            # A server for each caller, not an agent: a fork server has state (late imports, a prepared launch,
            # descriptors), which the next caller must not get.
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
        # The fork is not the caller's child, so the caller gets a pidfd, and its exit code over this channel.
        visitor.channel.try_send(Forked(pid), [visitor.pidfd])

    def _refusal(self, asked: AskFork | AskZygote) -> str:
        """Return why its forks are not suitable; "": they are."""
        return self.record.why_others(asked.variables) or self.files.why_others(asked.path)

    def _become_server(self, asked: AskFork, fds: list[int]) -> NoReturn:
        try:
            for visitor in self.visitors:
                close_all(visitor.fds())
            close_all([self._listener.detach(), *([self._removals] if self._removals >= 0 else [])])
            memfd, control, caller_fd, stdin, stderr = fds
            caller = payload.read(memfd)
            os.close(memfd)
            _take_over(caller, asked.path, stdin, stderr)
        except BaseException:
            os._exit(1)
        serve(Channel.adopt(control), caller.caller, None, asked.preload, self.offered, caller_fd)


def _take_over(caller: CallersProcess, path: Sequence[str], stdin: int, stderr: int) -> None:
    """Take over a caller's surroundings, in a new session. Owns the descriptors."""
    # Away from the terminal of the process that has started the zygote: its Ctrl-C is not for this caller.
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd, standard in ((stdin, 0), (null, 1), (stderr, 2)):
        os.dup2(fd, standard)
        os.close(fd)
    _take_signals(caller.ignored)
    process.set_environ(dict(caller.environ))
    sys.path[:] = path
    sys.executable = caller.executable
    multiprocessing.set_executable(caller.executable)
    # Finders have cached directories since the zygote began.
    importlib.invalidate_caches()
    settings.apply(caller.settings)
    _draw_afresh()


def _take_signals(ignored: Sequence[int]) -> None:
    """Change only handlers that differ: Python does not know those that C code has set."""
    for number in signal.valid_signals() - _PYTHONS - {signal.SIGKILL, signal.SIGSTOP}:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        wanted = signal.SIG_IGN if number in ignored else usual
        if signal.getsignal(number) != wanted:
            with contextlib.suppress(OSError, ValueError):  # the C library reserves some
                signal.signal(number, wanted)
    # Last: signals that were held back meet the caller's handlers, not the zygote's.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _draw_afresh() -> None:
    """Draw again what imports draw. Python's own generator does so by itself."""
    multiprocessing.current_process().authkey = os.urandom(_KEY_SIZE)
    generators = sys.modules.get("numpy.random")  # which numpy imports at its first use
    if generators is not None:
        generators.seed()
