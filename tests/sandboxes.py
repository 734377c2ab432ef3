"""Processes of this user that may do less than this one: forks that the kernel confines before they do anything."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_NONE = "there can be no sandbox here:"
_libc = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_USERS, _NEW_PIDS = 0x00020000, 0x10000000, 0x20000000  # linux/sched.h
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER, _DROP_FROM_BOUNDS = 38, 22, 2, 24  # linux/prctl.h
_ALLOW_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)  # BPF_RET, SECCOMP_RET_ALLOW
_CREATE_RULES, _RESTRICT = 444, 446  # Landlock's calls
_WRITE_FILE = 1 << 1


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[str]:
    """A memory cgroup for processes whose pids are written into the file. Skips where none can be made."""
    group = Path(f"/sys/fs/cgroup/memory/mlaunch-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        yield str(group / "cgroup.procs")
    finally:
        group.rmdir()


def no_new_privs() -> None:
    _checked(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))


def fewer_capabilities() -> None:
    """As with setpriv --bounding-set."""
    _checked(_libc.prctl(_DROP_FROM_BOUNDS, 21, 0, 0, 0))


def seccomp_filter() -> None:
    code = ctypes.create_string_buffer(_ALLOW_ALL)
    program = ctypes.create_string_buffer(struct.pack("@HxxxxxxP", 1, ctypes.addressof(code)))
    _checked(_libc.prctl(_SET_SECCOMP, _FILTER, program, 0, 0))


def landlock() -> None:
    """May write no file."""
    rules = _checked(_libc.syscall(_CREATE_RULES, struct.pack("=Q", _WRITE_FILE), 8, 0))
    no_new_privs()
    _checked(_libc.syscall(_RESTRICT, rules, 0))
    os.close(rules)


def own_users() -> None:
    _checked(_libc.unshare(_NEW_USERS))


def own_mounts() -> None:
    _checked(_libc.unshare(_NEW_MOUNTS))


def own_pids() -> None:
    """Only children are in the new namespace."""
    _checked(_libc.unshare(_NEW_PIDS))
    if (pid := os.fork()) > 0:
        os.waitpid(pid, 0)
        os._exit(0)


def another_root() -> None:
    """The directory in which it stands stays the same."""
    here = os.open(".", os.O_RDONLY)
    os.chroot("/usr")
    os.fchdir(here)


SANDBOXES = [
    no_new_privs, fewer_capabilities, seccomp_filter, landlock, own_users, own_mounts, own_pids, another_root
]  # fmt: skip


def nothing() -> None:
    """No sandbox at all."""


@dataclass
class Said:
    """What a fork says, once it is done. ``fd`` can be read then."""

    fd: int

    def __call__(self) -> str:
        text = os.read(self.fd, 4096).decode()
        if text.startswith(_NONE):
            pytest.skip(text)
        return text


def _enter(confine: Callable[[], None], writer: int) -> None:
    try:
        confine()
    except OSError as error:  # in a container, say, or with another kernel; or a library starts a thread in each fork
        threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        os.write(writer, f"{_NONE} {confine.__name__}: {error}; threads: {', '.join(threads)}".encode())
        os._exit(0)


@contextlib.contextmanager
def in_sandbox(confine: Callable[[], None], say: Callable[[], str]) -> Iterator[Said]:
    """Have a confined fork do something beside the block."""
    if os.getuid() != 0:
        pytest.skip("needs root, to make sandboxes of all kinds")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _enter(confine, writer)
            os.write(writer, say().encode())
        except OSError as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    try:
        yield Said(reader)
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)  # one that waits for ever, where a test has failed
        os.waitpid(pid, 0)


def said_in_sandbox(confine: Callable[[], None], say: Callable[[], str]) -> str:
    with in_sandbox(confine, say) as said:
        return said()
