"""The upkeep of zygotes: start, status, lifetime, end."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mlaunch.base import linux
from mlaunch.base.exceptions import LaunchError, describe_exit
from mlaunch.base.log import is_curious, tell_curious
from mlaunch.base.peer_process import (
    confinement,
    is_filtered,
    peer_process,
    pidfd_of_peer,
    read_proc,
    rights_lacking_to_peer,
)
from mlaunch.base.unfollowed import not_followed
from mlaunch.caller.server.attachments import in_memfds
from mlaunch.caller.server.start_server import with_huge_heap
from mlaunch.protocol import registry, token
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.server_messages import NotReady
from mlaunch.warm.wire import import_facts, zygote_place
from mlaunch.warm.wire.zygote_messages import AskZygote, KeepZygote, NotServed, ZygoteState

if TYPE_CHECKING:
    from mlaunch.warm.wire.zygote_messages import ZygoteHears, ZygoteSays

_BOOTSTRAP = "from mlaunch.warm.server.zygote_start import main; main({}, {}, {!r}, {}, {}, awaited={})"
_ANSWER_TIMEOUT = 5.0  # seconds
_IMPORT_TIMEOUT = 300.0  # seconds, from a slow disk, with the user's modules
_START_TIMEOUT = 60.0  # seconds for another start to end
_END_TIMEOUT = 10.0  # seconds
# The kernel names tracers; these programs follow what their child starts.
_NAMES = {"perf", "py-spy", "nsys", "ncu", "rr", "vtune", "uftrace", "valgrind", "strace", "ltrace", "gdb", "samply"}
_PARENT = 1  # behind the name and the state in /proc/PID/stat


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
        found += [f"the warm fork server (pid {state.pid}) imported torch under other circumstances:"]
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
            f"this process has no_new_privs or a seccomp filter, as in a container or a sandbox, so a kept fork server "
            f"would serve nobody: the kernel does not say whether two such processes are in the same one. If all that "
            f"run here as this user are, set {import_facts.SANDBOX}=1 for all of them"
        )
    directory = _directory(environ)
    with zygote_place.locked(directory, _START_TIMEOUT) as lock:
        found = keep(environ, key_of(environ), seconds)
        if found is not None:
            return found
        process, word = _start(environ, seconds, preload, directory, lock, awaited=True)
        with contextlib.closing(word):
            if exitcode := _status_of(process):
                raise LaunchError(f"the fork server that was to be kept {describe_exit(exitcode)}")
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
            f"no fork server can be kept: {directory}: {told}; set XDG_RUNTIME_DIR to a directory of yours"
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
        raise LaunchError(
            f"the fork server that was to be kept had not been forked after {_IMPORT_TIMEOUT:.0f} s"
        ) from None


def _hear(word: Channel[ZygoteSays, ZygoteHears]) -> ZygoteState:
    if not linux.wait_readable([word.fileno()], _IMPORT_TIMEOUT):
        raise LaunchError(f"the fork server that was to be kept had not imported all after {_IMPORT_TIMEOUT:.0f} s")
    try:
        record, _ = word.receive()
    except (OSError, EOFError):
        raise LaunchError("the fork server that was to be kept was killed before it was ready") from None
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
