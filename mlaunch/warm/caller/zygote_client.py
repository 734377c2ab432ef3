"""Requests to a zygote for a fork that becomes this process's fork server."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlaunch.base import linux
from mlaunch.base.fds import KeptFd, close_all, in_forks
from mlaunch.base.log import is_curious, tell_curious
from mlaunch.base.peer_process import differences_to_peer, peer_process
from mlaunch.caller import interrupts
from mlaunch.caller.server.attachments import in_memfds
from mlaunch.caller.server.fork_server import ForkServer
from mlaunch.caller.server.start_server import Interpreter, with_huge_heap
from mlaunch.protocol import settings
from mlaunch.protocol.channel import Channel
from mlaunch.warm.caller import zygote_upkeep
from mlaunch.warm.wire import import_facts, zygote_place
from mlaunch.warm.wire.zygote_messages import AskFork, CallersProcess, Forked, ForkEnded, NotForked, NotServed

if TYPE_CHECKING:
    from mlaunch.protocol.server_messages import ServerHears, ServerSays
    from mlaunch.warm.wire.zygote_messages import ZygoteHears, ZygoteSays

_PATIENCE = 5.0  # seconds for a fork, which takes 20 ms; starting a server takes seconds, too
_LONGEST = 60.0  # seconds of waiting behind others
_CHECK = 0.1  # seconds between checks that it is not stopped
_REAP_TIMEOUT = 1.0  # seconds for the record of how a fork has ended


def ask_zygote(
    places: Sequence[tuple[Path, str]], wish: float | None, environ: Mapping[str, str], like: Interpreter
) -> ForkServer | None:
    """Return a fork server that one of the user's zygotes has forked for this process; None: none is suitable.

    ``places``: of possible zygotes; ``wish``: start one at exit that stays for so many seconds; None: start none.
    """
    if not _is_this_program(like.executable):
        return None
    # The ranks would not be below the process that it follows. Nor is a zygote left, which it would follow for hours.
    if watching := zygote_upkeep.onlooker():
        tell_curious(f"no warm fork server is used: {watching} would not see its forks")
        return None
    facts = zygote_upkeep.facts_of(environ)
    server = _ask_one_of(places, facts, environ, like)
    if server is None and wish is not None:
        zygote_upkeep.leave_one(environ, wish, like.preload)
    return server


def _is_this_program(executable: str) -> bool:
    """True if it is this interpreter. Its directory counts: there it finds its virtual environment."""
    found, ours = shutil.which(executable) or executable, sys.executable
    beside = os.path.realpath(os.path.dirname(os.path.abspath(found)))
    return os.path.realpath(found) == os.path.realpath(ours) and beside == os.path.realpath(os.path.dirname(ours))


def _ask_one_of(
    places: Sequence[tuple[Path, str]], facts: import_facts.Facts, environ: Mapping[str, str], like: Interpreter
) -> ForkServer | None:
    """Ask the zygote with these facts, if there is one."""
    key = import_facts.key_of(facts)
    for directory, found in places:
        if found == key:
            connection = zygote_place.connect(directory, key)
            if connection is not None:
                return _ask(connection, facts, environ, like)
    if places and is_curious():
        for line in zygote_upkeep.why_none(facts):
            tell_curious(line)
    return None


def _ask(
    connection: socket.socket, facts: import_facts.Facts, environ: Mapping[str, str], like: Interpreter
) -> ForkServer | None:
    pid, _ = peer_process(connection)
    zygote: Channel[ZygoteSays, ZygoteHears] = Channel(connection)
    # Before it gets the environment, and before its answer is unpickled: a process in a sandbox that shares this
    # directory could have put its own socket there.
    if differences := differences_to_peer(connection, facts):
        zygote.close()
        tell_curious(f"the warm fork server (pid {pid}) is of no use: {differences}")
        return None
    ours: Channel[ServerSays, ServerHears]
    ours, theirs = Channel.pair()
    try:
        try:
            _send(zygote, theirs, environ, like)
        finally:
            # With a copy here, the channel would not end when the fork dies.
            theirs.close()
        answer, fds = _answer(zygote, pid)
        if isinstance(answer, Forked):
            fork = _Fork(zygote, fds[0])
            tell_curious(f"the fork server is a fork (pid {answer.pid}) of the warm one (pid {pid})")
            return ForkServer(ours, answer.pid, fork.wait, fork.kill)
        tell_curious(f"the warm fork server (pid {pid}) is of no use: {answer}")
    except OSError as error:
        tell_curious(f"the warm fork server (pid {pid}) is of no use: {error}")
    except BaseException:
        ours.close()
        zygote.close()
        raise
    ours.close()
    zygote.close()
    return None


def _send(
    zygote: Channel[ZygoteSays, ZygoteHears],
    control: Channel[ServerHears, ServerSays],
    environ: Mapping[str, str],
    like: Interpreter,
) -> None:
    ignored = tuple(int(number) for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN)
    surroundings = CallersProcess(
        os.getpid(),
        shutil.which(like.executable) or sys.executable,
        with_huge_heap(environ),
        settings.inherited(),
        ignored,
    )
    # A pidfd: by the time that the fork looks, this process's number may be another's.
    null, caller = os.open(os.devnull, os.O_RDWR), os.pidfd_open(os.getpid())
    try:
        # A closed one becomes /dev/null: the next file that is opened would get its number.
        stdin = 0 if like.stdin != subprocess.DEVNULL and linux.identity(0) is not None else null
        stderr = 2 if linux.identity(2) is not None else null
        with in_memfds([("surroundings", surroundings)]) as memfds:
            beside = [*memfds, control.fileno(), caller, stdin, stderr]
            zygote.send(AskFork(tuple(like.path), tuple(like.preload), import_facts.hashed(environ)), beside)
    finally:
        close_all([null, caller])


def _answer(zygote: Channel[ZygoteSays, ZygoteHears], pid: int) -> tuple[object, list[int]]:
    """Return its answer and descriptors. Kill one that is stopped or hangs, but not one that serves others."""
    begun = time.monotonic()
    end, worked = begun + _PATIENCE, linux.worked(pid)
    while not interrupts.wait_readable([zygote.fileno()], _CHECK):
        if linux.is_stopped(pid) or (time.monotonic() > end and linux.worked(pid) == worked):
            zygote_upkeep.kill(zygote, pid)
            return "it does not answer (was it stopped?) and was killed", []
        if time.monotonic() > begun + _LONGEST:
            return f"it had not come to this caller after {_LONGEST:.0f} s", []
        if time.monotonic() > end:
            end, worked = time.monotonic() + _PATIENCE, linux.worked(pid)
    with contextlib.suppress(EOFError):
        record, fds = zygote.receive()
        if isinstance(record, NotForked) and record.ends:
            zygote_upkeep.tell_of_end(pid, record.reason)
        return record.reason if isinstance(record, NotForked | NotServed) else record, fds
    return "it ended", []


class _Fork:
    """A fork server whose parent is the zygote, which reports how it has ended."""

    def __init__(self, zygote: Channel[ZygoteSays, ZygoteHears], pidfd: int) -> None:
        self._zygote = zygote
        self._pidfd = KeptFd(pidfd)
        self._exitcode: int | None = None
        _forks.add(self)

    def wait(self, seconds: float) -> int | None:
        """Return its exit code, or None if it is still running."""
        if self._exitcode is None and (not self._pidfd.intact() or linux.wait_readable([self._pidfd.fd], seconds)):
            self._exitcode = self._hear()
            self.forget()
        return self._exitcode

    def _hear(self) -> int:
        """Return its exit code; 0 if the zygote is gone, too."""
        with contextlib.suppress(OSError, EOFError):
            if self._zygote.intact() and linux.wait_readable([self._zygote.fileno()], _REAP_TIMEOUT):
                record, _ = self._zygote.receive()
                if isinstance(record, ForkEnded):
                    return record.exitcode
        return 0

    def kill(self) -> None:
        """Kill the fork."""
        if self._pidfd.intact():
            signal.pidfd_send_signal(self._pidfd.fd, signal.SIGKILL)

    def forget(self) -> None:
        """Close the descriptors, as a fork of this process does, which must not use them."""
        self._pidfd.close()
        self._zygote.close()


def _forget_inherited() -> None:
    for fork in list(_forks):
        fork.forget()


_forks: weakref.WeakSet[_Fork] = weakref.WeakSet()
in_forks(_forget_inherited)
