"""Linux beyond the standard library: processes and their ends, streams and descriptors, signals, memory, waiting."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import select
import signal
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

_REMOVED = 0x40 | 0x200 | 0x400 | 0x800  # IN_MOVED_FROM, IN_DELETE, IN_DELETE_SELF, IN_MOVE_SELF
_EVENTS = 65_536  # bytes of them at a time
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4  # linux/sched.h
_KEYCTL = {"x86_64": 250, "aarch64": 219, "ppc64le": 271}  # asm/unistd.h
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "ppc64le": 261}
_BITS = 64  # of a mask's words
_GET_KEYRING_ID, _SESSION_KEYRING = 0, -3  # linux/keyctl.h
_STDERR = 2
_IOLBF = 1
_KILLED_TIMEOUT = 5.0  # seconds for the kernel to end what was killed
_ASIDE = 500  # below the usual limit of 1,024

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")


def is_below(pid: int, ancestor: int) -> bool:
    """True if the process is this one, or one that it has started, at any depth."""
    while pid > 1 and pid != ancestor:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has ended
            return False
        pid = int(stat.rpartition(")")[2].split()[1])
    return pid == ancestor


def die_with(parent: int) -> None:
    """Ask the kernel to SIGKILL this process when the thread of ``parent`` that forked it ends.

    SIGKILL, since a death signal that can be ignored is ignored under ``nohup``.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died between fork and prctl, so the signal will never come
        os._exit(1)


def wake_with(parent: int) -> None:
    """Ask the kernel for SIGCONT when the thread of ``parent`` that forked this process ends.

    It wakes a process that was stopped (SIGSTOP), which then sees that its parent is gone; a running one ignores it.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGCONT)


def die_with_peer(fd: int) -> None:
    """Ask the kernel to SIGKILL this process when the other end of a socket is closed, or sends something.

    For a process that cannot be interrupted, such as in an import of a large library in C.
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    if wait_readable([fd], 0.0):  # it was closed before
        os._exit(1)


def outlive_peer(fd: int) -> None:
    """Undo ``die_with_peer``."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_ASYNC)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent dies, so that daemons cannot escape."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def above_standard(fd: int) -> int:
    """Return ``fd``, moved if it took the number of a standard stream that this process has closed."""
    if fd > _STDERR:
        return fd
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1)
    os.close(fd)
    return moved


def aside(fd: int) -> int:
    """Return a duplicate of ``fd`` with a number that files opened later do not get, even if others close it."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ASIDE)
    except OSError:  # so many are not allowed
        return fd


def identity(fd: int) -> tuple[int, int] | None:
    """Return (inode, device) of an open descriptor; None if it is closed."""
    try:
        return os.fstat(fd)[1:3]  # not by name, which takes longer: each short call asks
    except OSError:
        return None


def identities(fds: Iterable[int]) -> dict[int, tuple[int, int] | None]:
    """Return the identities of several descriptors."""
    found: dict[int, tuple[int, int] | None] = {}
    try:
        for fd in fds:
            found[fd] = os.fstat(fd)[1:3]
    except OSError:
        return {fd: identity(fd) for fd in fds}
    return found


def open_standard_streams() -> None:
    """Put /dev/null where a standard stream is closed, so that no other file gets its number."""
    # The kernel takes the lowest free number first.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)


def leave_standard_streams() -> None:
    """Put /dev/null in place of the standard streams of the process that started this one."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.close(null)


_NEEDED: dict[str, Callable[[], int]] = {
    "pidfd_open": lambda: os.pidfd_open(os.getpid()),
    "memfd_create": lambda: os.memfd_create("mlaunch-check", os.MFD_CLOEXEC),
}


@functools.cache
def check_kernel() -> None:
    """Raise OSError, with the reason, if this process may not make the newest system calls that each launch makes."""
    for name, call in _NEEDED.items():
        try:
            os.close(call())
        except OSError as error:
            if error.errno in {errno.ENOSYS, errno.EPERM, errno.EACCES}:
                raise OSError(
                    error.errno,
                    f"mlaunch needs the system call {name}, which is refused here ({error.strerror}): the kernel is "
                    f"older than Linux 5.3, or this container's filter of system calls (seccomp) has to allow it",
                ) from None


def memory_is_short() -> bool:
    """True if less than a tenth of the machine's memory is left; False where that is unknown."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()[:3]:
            name, _, rest = line.partition(":")
            found[name] = int(rest.split()[0])
    return 10 * found.get("MemAvailable", 1) < found.get("MemTotal", 0)


def print_by_lines() -> None:
    """Make C code write each line as it prints it, even into a pipe."""
    _libc.setvbuf(ctypes.c_void_p.in_dll(_libc, "stdout"), None, _IOLBF, 0)


def signal_group(pgid: int, number: int) -> None:
    """Signal a process group; ignore one that has no process left."""
    # PermissionError: only processes of other users (sudo) are left in the group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


def continue_group_of(child: int) -> None:
    """Continue the stopped processes of a group that a child leads."""
    if _is_child(child):  # it is not reaped, so the number is its group's
        signal_group(child, signal.SIGCONT)


def signal_if_not_leader(pid: int, pidfd: int, number: int) -> None:
    """Signal a process that no longer leads a group of its own, so that a signal to its group would miss it."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) != pid:
            signal.pidfd_send_signal(pidfd, number)


def has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def children() -> set[int]:
    """Return the pids whose parent is this process, zombies included; none without /proc."""
    pids: set[int] = set()
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                pids.update(map(int, (task / "children").read_text(encoding="utf-8").split()))
        if os.readlink("/proc/self") != str(os.getpid()):
            pids = _numbers_here(pids)
    return {pid for pid in pids if _is_child(pid)}


def _numbers_here(foreign: set[int]) -> set[int]:
    """Return the numbers that processes have in this namespace of pids, where /proc is that of an outer one."""
    depth = len(_numbers("self"))
    found = set()
    for pid in foreign:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.update(_numbers(str(pid))[depth - 1 : depth])
    return found


def _numbers(pid: str) -> list[int]:
    """Return a process's numbers, from the namespace of /proc inwards."""
    rows = Path(f"/proc/{pid}/status").read_bytes().splitlines()  # bytes: a process may have any name
    return [int(number) for row in rows if row.startswith(b"NSpid:") for number in row.split()[1:]]


def is_stopped(pid: int) -> bool:
    """True if a process is being stopped by a signal, or has been; without our /proc this is known of children only.

    The kernel tells the parent only when the last thread has stopped, so this reads the main thread's state in /proc,
    if its numbers are ours.
    """
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self") == str(os.getpid()):
            return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in {b"T", b"t"}
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def has_ended(pid: int) -> bool:
    """True if a process is gone, is a zombie, or is ending in the kernel; False where that cannot be known."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's
        pass
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self") == str(os.getpid()):  # else its numbers are not ours
            state, *_, flags = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:7]
            return state in {b"Z", b"X"} or bool(int(flags) & _PF_EXITING)
    return False


def worked(pid: int) -> str:
    """Return a text that changes while a process works, or waits for a CPU; "" where the kernel has none."""
    with contextlib.suppress(OSError):
        # Nanoseconds on a CPU, nanoseconds of waiting for one, and the number of times that it had one.
        return Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii")
    return ""


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def kill_children(spare: Collection[int] = (), timeout: float = _KILLED_TIMEOUT) -> None:
    """Kill and reap every child except ``spare``, and the descendants that this process adopts as they die.

    A process that cannot be killed within ``timeout`` seconds (it sits in the kernel on a dead file system) is left
    unreaped.
    """
    stuck: set[int] = set()
    while has_children():
        strangers = children() - set(spare) - stuck
        if not strangers:
            return
        for pid in strangers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        stuck.update(pid for pid in strangers if not _reap(pid, timeout))


def _reap(pid: int, timeout: float) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if not wait_readable([pidfd], timeout):
            return False
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass
    finally:
        os.close(pidfd)
    return True


def status_within(pid: int, timeout: float) -> int:
    """Reap a child and return its status, as os.waitpid does; kill it if it has not ended within ``timeout`` seconds.

    If it sits in the kernel and cannot be killed yet, return SIGKILL's status seconds later, and leave it unreaped.
    """
    pidfd = os.pidfd_open(pid)
    try:
        if not wait_readable([pidfd], timeout):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            if not wait_readable([pidfd], _KILLED_TIMEOUT):
                return int(signal.SIGKILL)
        return os.waitpid(pid, 0)[1]
    finally:
        os.close(pidfd)


def wait_readable(fds: Iterable[int], timeout: float | None = None) -> list[int]:
    """Return the descriptors that can be read (or are at their end) within ``timeout`` seconds; None: no limit."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(None if timeout is None else max(0, timeout) * 1000)]


def watch_removals(directory: str) -> int:
    """Return a descriptor that can be read when a file there, or the directory, was removed or renamed; -1: failed."""
    fd: int = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    if fd >= 0 and _libc.inotify_add_watch(fd, os.fsencode(directory), _REMOVED) < 0:
        os.close(fd)
        return -1
    return fd


def take_removals(fd: int) -> None:
    """Read the notices of ``watch_removals``."""
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, _EVENTS):
            pass


def session_keyring() -> str:
    """Return the number of this process's session keyring; "" where the kernel does not say."""
    number = _KEYCTL.get(os.uname().machine)
    found = -1 if number is None else _libc.syscall(number, _GET_KEYRING_ID, _SESSION_KEYRING, 0)
    return str(found) if found >= 0 else ""


def set_memory_policy(mode: int, nodes: Collection[int]) -> None:
    """Set the NUMA nodes from which this thread, and what it starts, gets memory. ``mode``: of linux/mempolicy.h.

    Raises:
        OSError: The kernel refuses.
    """
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    words = max(nodes, default=0) // _BITS + 1
    mask = (ctypes.c_uint64 * words)()
    for node in nodes:
        mask[node // _BITS] |= 1 << node % _BITS
    # The kernel reads one bit less than it is given.
    if _libc.syscall(number, mode, mask, ctypes.c_ulong(words * _BITS + 1)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def working_directory() -> str:
    """Return this process's working directory; FileNotFoundError, with advice, if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            "the working directory of this process no longer exists, so ranks cannot start in it; change to another "
            "one first"
        ) from error
