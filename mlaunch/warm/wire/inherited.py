"""What a process has from the one that starts it, survives exec, and no later call gives to a process that runs."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Mapping

from mlaunch.base.confinement import read

_libc = ctypes.CDLL(None, use_errno=True)
# From linux/prctl.h: those that are asked by their return value. What a kernel does not know is -1 in all processes.
_PRCTL = {
    "huge pages": 42,  # PR_GET_THP_DISABLE
    "secure bits": 27,
    "machine checks": 34,  # PR_MCE_KILL_GET
    "I/O flusher": 58,
    "no writable code": 66,  # PR_GET_MDWE
    "merged memory": 68,  # KSM
}
_SPECULATION, _SPECULATIONS = 52, range(3)
_CORE, _GET, _THIS_THREAD = 62, 0, 0  # PR_SCHED_CORE
_SCHEDULING_SIZE = 56  # of struct sched_attr, with the bounds of utilisation
_MOST_NODES = 1024
# ioprio_get, get_mempolicy, sched_getattr
_CALLS = {"x86_64": (252, 239, 315), "aarch64": (31, 236, 275), "riscv64": (31, 236, 275)}


def inherited() -> dict[str, str]:
    """Return all that, by the words that a person is shown."""
    return {
        # Of it the C library takes the size of threads' stacks, and the kernel where memory is mapped.
        "stack limit": str(resource.getrlimit(resource.RLIMIT_STACK)[0]),
        "core dump filter": _text("coredump_filter"),
        "cache and bandwidth group": _text("cpu_resctrl_groups"),
        **{name: str(_prctl(number)) for name, number in _PRCTL.items()},
        "speculation": " ".join(str(_prctl(_SPECULATION, number)) for number in _SPECULATIONS),
        "core scheduling": _core(),
        **{name: say(*_CALLS[os.uname().machine]) for name, say in _SAID.items() if os.uname().machine in _CALLS},
    }


def _prctl(option: int, argument: int = 0) -> int:
    return int(_libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0))


def _core() -> str:
    cookie = ctypes.c_ulong()
    _libc.prctl(_CORE, _GET, 0, _THIS_THREAD, ctypes.byref(cookie))
    return str(cookie.value)


def _io_priority(number: int, *_: int) -> str:
    return str(_libc.syscall(number, 1, 0))  # of this process


def _memory_policy(_: int, number: int, *__: int) -> str:
    mode, nodes = ctypes.c_int(), ctypes.create_string_buffer(_MOST_NODES // 8)
    _libc.syscall(number, ctypes.byref(mode), nodes, _MOST_NODES, 0, 0)
    return f"{mode.value} {int.from_bytes(nodes.raw, 'little'):x}"


def _scheduling(_: int, __: int, number: int) -> str:
    found = ctypes.create_string_buffer(_SCHEDULING_SIZE)
    _libc.syscall(number, 0, found, _SCHEDULING_SIZE, 0)
    return found.raw.hex()


def _text(name: str) -> str:
    try:
        return read(f"/proc/self/{name}").strip()
    except OSError:
        return ""


_SAID: Mapping[str, Callable[..., str]] = {
    "I/O priority": _io_priority,
    "memory policy": _memory_policy,
    "scheduling": _scheduling,
}
