"""The facts that count when a process imports torch: one with equal facts can be a fork of another.

Libraries read some of them as they are loaded; others a process cannot change later (its user, its namespaces, its
cgroup, hard limits).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from mlaunch import _version
from mlaunch.base import linux
from mlaunch.base.peer_process import confinement, read_proc
from mlaunch.protocol.settings import import_variables

Facts = dict[str, str]  # by the words that a person is shown

# Read by the interpreter, its .pth files, and the C library.
_READ_AT_START = (
    "LANG",
    "LC_",
    "LOCPATH",
    "GLIBC_TUNABLES",
    "COVERAGE_PROCESS_",
    "COV_CORE_",
    "SETUPTOOLS_USE_DISTUTILS",
)
# Read by BLAS libraries, which set their number of threads when loaded. A rank's own number, for torch, comes later.
_THREADS = ("OMP_NUM_THREADS", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "I_MPI_")
# Without cgroups, a scheduler would end and account for ranks of one job with another job.
_JOBS = {"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "JOB_ID"}
# To be set if all processes that can reach the runtime directory share one sandbox, which the kernel does not show.
SANDBOX = "MLAUNCH_WARM_SANDBOX"
# By these, an interpreter finds libraries and the user's files.
_USUAL = {"PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "VIRTUAL_ENV"}
_SHORT = 8  # bytes of a hash of a variable
_SHOWN = 60  # characters of a value that differs
_TOLD = 400  # characters of a value that go into a record; the rest is a hash

_libc = ctypes.CDLL(None, use_errno=True)
# From linux/prctl.h, those that return the value. What a kernel does not know is -1 in all processes.
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


def _variables_that_count(environ: Mapping[str, str]) -> dict[str, str]:
    return import_variables(environ) | {
        name: value
        for name, value in environ.items()
        if name.startswith((*_READ_AT_START, *_THREADS)) or name in _JOBS or name == SANDBOX
    }


def environ_to_keep(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a process that outlives the shell: none of the shell's secrets."""
    return _variables_that_count(environ) | {name: environ[name] for name in sorted(_USUAL & environ.keys())}


def hashed(environ: Mapping[str, str]) -> bytes:
    """Return hashes of the variables, which can be compared and not be read."""
    return b"".join(_short(name) + _short(f"{name}={value}") for name, value in environ.items())


class Hashes:
    """The result of ``hashed``."""

    def __init__(self, variables: bytes) -> None:
        pairs = range(0, len(variables), 2 * _SHORT)
        self._found = {variables[at : at + _SHORT]: variables[at + _SHORT : at + 2 * _SHORT] for at in pairs}

    def has(self, name: str, value: str | None) -> bool:
        """True if this variable has this value; None: is not set."""
        return self._found.get(_short(name)) == (None if value is None else _short(f"{name}={value}"))


def _short(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=_SHORT).digest()


def shares_sandbox(environ: Mapping[str, str]) -> bool:
    """True if these variables say that all processes here share one sandbox."""
    return environ.get(SANDBOX, "0") not in {"", "0"}


def of_this_process(environ: Mapping[str, str]) -> Facts:
    """Return the facts of this process, for an import under ``environ``."""
    return {
        "interpreter": f"{os.path.realpath(sys.executable)} {_file(sys.executable)}",
        "Python": sys.version,
        "prefix": f"{sys.prefix} {_file(sys.prefix)}",
        "mlaunch": f"{_version.__version__} {_file(os.path.dirname(os.path.abspath(_version.__file__)))}",
        "flags of the interpreter": " ".join(subprocess._args_from_interpreter_flags()),  # type: ignore[attr-defined]
        "priority": f"{os.getpriority(os.PRIO_PROCESS, 0)} {os.sched_getscheduler(0)} {_text('oom_score_adj')}",
        # Soft ones come with the call; a lowered hard limit cannot be raised.
        "hard limits": " ".join(str(resource.getrlimit(number)[1]) for number in _limits()),
        "personality": _text("personality"),
        **_inherited(),
        "session keyring": linux.session_keyring(),
        # Rights cannot be regained; memory and CPU would count for another cgroup, the login for another session.
        **_confined(),
        **{f"variable {name}": value for name, value in _variables_that_count(environ).items()},
    }


def key_of(facts: Facts) -> str:
    """Return a unique name for these facts."""
    whole = "\0".join(f"{name}\0{value}" for name, value in sorted(facts.items()))
    # It is the socket's name, so a process that would be refused finds none.
    return _hash(whole)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]


def told(facts: Mapping[str, str]) -> Facts:
    """Return the facts for a record: of a long value, the beginning and a hash."""
    return {
        name: value if len(value) <= _TOLD else f"{value[:_TOLD]}... {_hash(value)}" for name, value in facts.items()
    }


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Return a line for each difference. ``there``: as ``told`` returns it."""
    here = told(here)
    found = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    return [f"{name}: {_apart(here.get(name), there.get(name))}" for name in found]


def foreign_entries(path: Sequence[str], base: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return entries of ``path`` that ``base`` lacks, and those it lacks of ``base``: all if their order differs."""
    common = list(dict.fromkeys(entry for entry in path if entry in base))
    lacking = [entry for entry in base if entry not in path]
    # Order counts: the first of two modules with one name is imported. A second entry of a place does not count.
    is_in_order = common == list(dict.fromkeys(base))
    return [entry for entry in path if entry not in base], lacking if lacking or is_in_order else list(base)


def _limits() -> list[int]:
    return sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})


def _file(path: str) -> str:
    """Return the device and inode of a file."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return f"({status.st_dev}:{status.st_ino})"
    return "(none)"


def _text(name: str) -> str:
    """Return a file of /proc/self; "" where the kernel has none."""
    with contextlib.suppress(OSError):
        return read_proc(f"/proc/self/{name}").strip(" \n\0")
    return ""


def _confined() -> Facts:
    with contextlib.suppress(OSError):  # no /proc: then no zygote serves this process
        return confinement()
    return {}


def _apart(here: str | None, there: str | None) -> str:
    """Return the parts of two values in which they differ."""
    pairs = zip(here or "", there or "", strict=False)
    equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    if equal >= _TOLD:
        return f"equal in the first {_TOLD} characters, and not behind them"
    begin = max(0, equal - _SHOWN // 2) if equal > _SHOWN // 2 else 0
    return f"here {_shown(here, begin)}, there {_shown(there, begin)}"


def _shown(value: str | None, begin: int) -> str:
    if value is None:
        return "not set"
    shown = value[begin : begin + _SHOWN]
    return repr(f"{'...' * (begin > 0)}{shown}{'...' * (len(value) > begin + _SHOWN)}")


# Inherited from the parent


def _inherited() -> dict[str, str]:
    """Return what a process inherits from its parent, survives exec, and cannot be changed from outside later."""
    return {
        # The C library sizes threads' stacks by it, and the kernel places mappings.
        "stack limit": str(resource.getrlimit(resource.RLIMIT_STACK)[0]),
        "core dump filter": _text("coredump_filter"),
        "cache and bandwidth group": _text("cpu_resctrl_groups"),
        **{name: str(_prctl(number)) for name, number in _PRCTL.items()},
        "speculation": " ".join(str(_prctl(_SPECULATION, number)) for number in _SPECULATIONS),
        "core scheduling": _core(),
        **{name: ask(*_CALLS[os.uname().machine]) for name, ask in _ASKED.items() if os.uname().machine in _CALLS},
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


_ASKED: Mapping[str, Callable[..., str]] = {
    "I/O priority": _io_priority,
    "memory policy": _memory_policy,
    "scheduling": _scheduling,
}
