"""Zygotes, from the caller's side: ask one for a fork that becomes the fork server; start, inspect and end them."""

from __future__ import annotations

import atexit
import contextlib
import errno
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
from typing import TYPE_CHECKING, cast

from mlaunch.base import linux
from mlaunch.base.exceptions import LaunchError, describe_exit
from mlaunch.base.fds import KeptFd, close_all, in_forks
from mlaunch.base.log import is_curious, tell_curious
from mlaunch.base.own_process import not_followed
from mlaunch.base.peer_process import (
    confinement,
    differences_to_peer,
    is_filtered,
    peer_process,
    pidfd_of_peer,
    read_proc,
    rights_lacking_to_peer,
)
from mlaunch.caller import interrupts
from mlaunch.caller.fork_server import ForkServer, Interpreter, in_memfds, with_huge_heap
from mlaunch.protocol import registry, settings, token
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.server_messages import NotReady
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
    from mlaunch.protocol.server_messages import ServerHears, ServerSays
    from mlaunch.warm.wire.zygote_messages import ZygoteHears, ZygoteSays

_BOOTSTRAP = "from mlaunch.warm.server import main; main({}, {}, {!r}, {}, {}, awaited={})"
_ANSWER_TIMEOUT = 5.0  # seconds
_IMPORT_TIMEOUT = 300.0  # seconds, from a slow disk, with the user's modules
_START_TIMEOUT = 60.0  # seconds for another start to end
_END_TIMEOUT = 10.0  # seconds
# The kernel names tracers; these programs follow what their child starts.
_NAMES = {"perf", "py-spy", "nsys", "ncu", "rr", "vtune", "uftrace", "valgrind", "strace", "ltrace", "gdb", "samply"}
_PARENT = 1  # behind the name and the state in /proc/PID/stat
_PATIENCE = 5.0  # seconds for a fork, which takes 20 ms; starting a server takes seconds, too
_LONGEST = 60.0  # seconds of waiting behind others
_CHECK = 0.1  # seconds between checks that it is not stopped
_REAP_TIMEOUT = 1.0  # seconds for the record of how a fork has ended


# Ask for a fork


def ask_zygote(
    places: Sequence[tuple[Path, str]], wish: float | None, environ: Mapping[str, str], like: Interpreter
) -> ForkServer | None:
    """Return a fork server that one of the user's zygotes has forked for this process; None: none is suitable.

    ``places``: of possible zygotes; ``wish``: start one at exit that stays for so many seconds; None: start none.
    """
    if not _is_this_program(like.executable):
        return None
    # The ranks would not be below the process that it follows. Nor is a zygote left, which it would follow for hours.
    if watching := onlooker():
        tell_curious(f"no warm fork server is used: {watching} would not see its forks")
        return None
    facts = facts_of(environ)
    server = _ask_one_of(places, facts, environ, like)
    if server is None and wish is not None:
        leave_one(environ, wish, like.preload)
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
        for line in why_none(facts):
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
        tell_curious(f"the warm fork server (pid {pid}) cannot be used: {differences}")
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
        tell_curious(f"the warm fork server (pid {pid}) cannot be used: {answer}")
    except OSError as error:
        tell_curious(f"the warm fork server (pid {pid}) cannot be used: {error}")
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
            kill(zygote, pid)
            return "it does not answer (was it stopped?) and was killed", []
        if time.monotonic() > begun + _LONGEST:
            return f"it had not come to this caller after {_LONGEST:.0f} s", []
        if time.monotonic() > end:
            end, worked = time.monotonic() + _PATIENCE, linux.worked(pid)
    with contextlib.suppress(EOFError):
        record, fds = zygote.receive()
        if isinstance(record, NotForked) and record.ends:
            tell_of_end(pid, record.reason)
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


# Start, inspect, keep and end zygotes


def tell_of_end(pid: int, reason: str) -> None:
    """Print why the zygote ends, unless details are printed anyway, or another one will be left."""
    if not is_curious() and not os.environ.get(zygote_place.VARIABLE):
        with contextlib.suppress(OSError, AttributeError):
            again = "start another with mlaunch warm"
            print(f"mlaunch: the warm fork server (pid {pid}) ends: {reason}; {again}", file=sys.stderr, flush=True)


def key_of(environ: Mapping[str, str]) -> str:
    """Return the key of the zygote whose forks can serve this process."""
    return import_facts.key_of(facts_of(environ))


def facts_of(environ: Mapping[str, str]) -> import_facts.Facts:
    """Return this process's facts, which decide that."""
    return import_facts.of_this_process(with_huge_heap(environ))


def states(environ: Mapping[str, str], *, facts: bool = False) -> list[ZygoteState]:
    """Return the states of this user's zygotes, without those that do not answer."""
    asked = AskZygote(facts, tuple(sys.path), import_facts.hashed(environ)) if facts else AskZygote()
    answers = (_converse(directory, key, asked) for directory, key in zygote_place.names(environ))
    return [answer for answer in answers if answer is not None]


def keep(environ: Mapping[str, str], key: str, seconds: float | None) -> ZygoteState | None:
    """Set how long the zygote of this key stays after its last use (None: unchanged); return its state, if any."""
    record = AskZygote() if seconds is None else KeepZygote(seconds)
    for directory, found in zygote_place.names(environ):
        if found == key and (state := _converse(directory, key, record)) is not None:
            return state
    return None


def _converse(directory: Path, key: str, record: ZygoteHears) -> ZygoteState | None:
    connection = zygote_place.connect(directory, key)
    if connection is None:
        return None
    channel: Channel[ZygoteSays, ZygoteHears] = Channel(connection)
    with contextlib.closing(channel), contextlib.suppress(OSError, EOFError):
        # Its answer is unpickled here, so it must not come out of a sandbox.
        if lacking := rights_lacking_to_peer(connection):
            tell_curious(f"the warm fork server (pid {peer_process(connection)[0]}) is not asked: {lacking}")
            return None
        channel.send(record)
        if linux.wait_readable([channel.fileno()], _ANSWER_TIMEOUT):
            answer, _ = channel.receive()
            if isinstance(answer, NotServed) and isinstance(record, AskZygote):
                return answer.state
            return answer if isinstance(answer, ZygoteState) else None
    return None


def end_all(environ: Mapping[str, str]) -> list[int]:
    """End this user's zygotes; return their pids. One that is stopped or hangs is killed."""
    ended = []
    for directory, key in zygote_place.names(environ):
        connection = zygote_place.connect(directory, key)
        if connection is not None:
            with connection, contextlib.suppress(OSError):  # it has ended, or is in another namespace
                ended.append(_end(connection))
    return ended


def _end(connection: socket.socket) -> int:
    """End the zygote at the other end, and wait for that; return its pid. OSError: this process may not."""
    pid, _ = peer_process(connection)
    pidfd = pidfd_of_peer(connection)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        if linux.is_stopped(pid) or not linux.wait_readable([pidfd], _END_TIMEOUT):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            linux.wait_readable([pidfd], _END_TIMEOUT)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)
    return pid


def kill(channel: Channel[ZygoteSays, ZygoteHears], pid: int) -> None:
    """Kill the process at the other end of a channel, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        # At the end of the channel, the pidfd could be another process's.
        if not linux.wait_readable([channel.fileno()], 0.0):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            linux.wait_readable([pidfd], _END_TIMEOUT)
        os.close(pidfd)


def why_none(facts: import_facts.Facts) -> list[str]:
    """Return, for each zygote, why its forks are not suitable for a process of these facts."""
    found = []
    for state in states(os.environ, facts=True):
        found += [f"the warm fork server (pid {state.pid}) imported torch in another environment; these differ:"]
        found += [f"  {line}" for line in import_facts.differences(facts, state.facts)]
    return found


def begin(environ: Mapping[str, str], seconds: float, preload: Sequence[str]) -> ZygoteState:
    """Start a zygote and wait until it is ready; if another start was faster, return that one's state.

    Raises:
        OSError: The runtime directory cannot be used.
        LaunchError: A module cannot be imported, or the zygote would refuse all processes here.
    """
    if would_serve_nobody(environ):
        raise LaunchError(
            f"this process has no_new_privs or a seccomp filter, as in a container or a sandbox, so a warm fork server "
            f"would refuse all others: the kernel does not say whether two such processes share a sandbox. If all "
            f"processes of this user here share one, set {import_facts.SANDBOX}=1 for all of them"
        )
    directory = _directory(environ)
    with zygote_place.locked(directory, _START_TIMEOUT) as lock:
        found = keep(environ, key_of(environ), seconds)
        if found is not None:
            return found
        process, word = _start(environ, seconds, preload, directory, lock, awaited=True)
        with contextlib.closing(word):
            if exitcode := _status_of(process):
                raise LaunchError(f"the warm fork server {describe_exit(exitcode)} before it was ready")
            return _hear(word)


def would_serve_nobody(environ: Mapping[str, str]) -> bool:
    """True if a zygote of this process would refuse all processes with the same confinement."""
    with contextlib.suppress(OSError):
        return is_filtered(confinement()) and not import_facts.shares_sandbox(environ)
    return True


def _directory(environ: Mapping[str, str]) -> Path:
    directory = registry.home(environ)
    try:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        with registry.opened(directory) as place:
            if not os.access(place, os.W_OK | os.X_OK):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        told = error.strerror or str(error)
        raise OSError(
            f"no warm fork server can be started: {directory}: {told}; set XDG_RUNTIME_DIR to a directory of yours"
        ) from error
    return directory


def _start(
    environ: Mapping[str, str], seconds: float, preload: Sequence[str], directory: Path, lock: int, *, awaited: bool
) -> tuple[subprocess.Popen[bytes], Channel[ZygoteSays, ZygoteHears]]:
    ours: Channel[ZygoteSays, ZygoteHears]
    ours, theirs = Channel.pair()
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    code = _BOOTSTRAP.format(theirs.fileno(), lock, str(directory), seconds, tuple(preload), awaited)
    kept = import_facts.environ_to_keep(environ)
    # Variables that modules may read while they are imported, and no longer: in /proc/PID/environ, all forks would have
    # the secrets of the shell for hours.
    rest = {name: value for name, value in environ.items() if name not in kept and name != token.VARIABLE}
    with in_memfds([("environ", rest if preload else {})]) as (passed,), not_followed():
        process = subprocess.Popen(
            [sys.executable, *flags, "-c", code, "mlaunch-fork-server"],
            env=with_huge_heap(kept),
            cwd="/",  # else a file system could not be unmounted
            stdin=passed,
            stdout=subprocess.DEVNULL,
            # One that is left imports after its starter's end; a reader (`| tee`) waits for the end of the stream.
            stderr=None if awaited else subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), lock],
            start_new_session=True,  # to survive the terminal's Ctrl-C and hang-up
        )
    theirs.close()
    return process, ours


def _status_of(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of the interpreter that forks the zygote; kill it if a debugger or SIGSTOP holds it up."""
    try:
        return process.wait(_IMPORT_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        raise LaunchError(f"the warm fork server was not forked within {_IMPORT_TIMEOUT:.0f} s") from None


def _hear(word: Channel[ZygoteSays, ZygoteHears]) -> ZygoteState:
    if not linux.wait_readable([word.fileno()], _IMPORT_TIMEOUT):
        raise LaunchError(f"the warm fork server did not finish its imports within {_IMPORT_TIMEOUT:.0f} s")
    try:
        record, _ = word.receive()
    except (OSError, EOFError):
        raise LaunchError("the warm fork server was killed before it was ready") from None
    if isinstance(record, NotReady):
        raise LaunchError(record.reason)
    return cast(ZygoteState, record)


def leave_one(environ: Mapping[str, str], seconds: float, preload: Sequence[str]) -> None:
    """Start a zygote when this process ends, and no longer waits for anything."""
    if not _left:
        atexit.register(_leave)
    _left[:] = [(os.getpid(), dict(environ), seconds, tuple(preload))]


def _leave() -> None:
    pid, environ, seconds, preload = _left[0]
    if pid != os.getpid() or would_serve_nobody(environ):  # a fork, which ends as its parent would
        return
    with contextlib.suppress(OSError):
        directory = _directory(environ)
        with zygote_place.locked(directory) as lock:
            if keep(environ, key_of(environ), None) is None:
                process, word = _start(environ, seconds, preload, directory, lock, awaited=False)
                process.returncode = 0  # its next parent reaps it
                word.close()


_left: list[tuple[int, dict[str, str], float, tuple[str, ...]]] = []


def onlooker() -> str:
    """Return the debugger or profiler that follows this process to its children, "strace (pid 7)"; "": none.

    It would not see a fork of another process.
    """
    with contextlib.suppress(OSError, ValueError):  # no /proc, or a process that is not shown
        rows = read_proc("/proc/self/status").splitlines()
        tracer = next((row.split()[1] for row in rows if "TracerPid" in row), "0")
        if tracer != "0":
            return f"{read_proc(f'/proc/{tracer}/comm').strip()} (pid {tracer})"
        pid = os.getppid()
        while pid > 1:
            name, _, rest = read_proc(f"/proc/{pid}/stat").partition("(")[2].rpartition(")")
            if name.partition("_")[0] in _NAMES:  # Debian's perf has the kernel's version behind its name
                return f"{name} (pid {pid})"
            pid = int(rest.split()[_PARENT])
    return ""
