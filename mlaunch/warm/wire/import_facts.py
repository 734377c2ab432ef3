"""What counts when a process imports torch: one for which all of it is equal can be a fork of another.

Some of it is read by libraries as they are loaded, some is what a process cannot take back later (its user, its
namespaces, its cgroup, limits that are never raised again).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlaunch import _version
from mlaunch.base import linux
from mlaunch.base.confinement import confinement
from mlaunch.protocol.import_variables import variables
from mlaunch.warm.wire.inherited import inherited

Facts = dict[str, str]  # by the words that a person is shown

# By the interpreter, what its .pth files run, and the C library.
_READ_AT_START = (
    "LANG",
    "LC_",
    "LOCPATH",
    "GLIBC_TUNABLES",
    "COVERAGE_PROCESS_",
    "COV_CORE_",
    "SETUPTOOLS_USE_DISTUTILS",
)
# By BLAS libraries, which number their threads as they are loaded. A rank's own number comes later, and is torch's.
_THREADS = ("OMP_NUM_THREADS", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "I_MPI_")
# Where a scheduler has no cgroups, ranks of one job would be another's children, and end with it or be counted there.
_JOBS = {"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "JOB_ID"}
# Set where all processes that can reach the runtime directory share one sandbox: no_new_privs and filters are equal
# there, and the kernel does not say whether the rest of it is.
SANDBOX = "MLAUNCH_WARM_SANDBOX"
# Besides what counts, an interpreter finds libraries and the user's files by these.
_USUAL = {"PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "VIRTUAL_ENV"}
_SHORT = 8  # bytes of a hash of a variable
_SHOWN = 60  # characters of a value that differs
_TOLD = 400  # characters of one that go into a record; what is behind them is told by a hash


def _variables_that_count(environ: Mapping[str, str]) -> dict[str, str]:
    return variables(environ) | {
        name: value
        for name, value in environ.items()
        if name.startswith((*_READ_AT_START, *_THREADS)) or name in _JOBS or name == SANDBOX
    }


def environ_to_keep(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process needs which outlives the shell that has them: no secret of that shell."""
    return _variables_that_count(environ) | {name: environ[name] for name in sorted(_USUAL & environ.keys())}


def hashed(environ: Mapping[str, str]) -> bytes:
    """Return variables in a form in which they can be compared, and not be read."""
    return b"".join(_short(name) + _short(f"{name}={value}") for name, value in environ.items())


class Hashes:
    """What ``hashed`` has made."""

    def __init__(self, variables: bytes) -> None:
        pairs = range(0, len(variables), 2 * _SHORT)
        self._found = {variables[at : at + _SHORT]: variables[at + _SHORT : at + 2 * _SHORT] for at in pairs}

    def has(self, name: str, value: str | None) -> bool:
        """True if this variable has this value; None: is not set."""
        return self._found.get(_short(name)) == (None if value is None else _short(f"{name}={value}"))


def _short(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=_SHORT).digest()


def shares_sandbox(environ: Mapping[str, str]) -> bool:
    """True if whoever set these variables says that all who ask share one sandbox."""
    return environ.get(SANDBOX, "0") not in {"", "0"}


def of_this_process(environ: Mapping[str, str]) -> Facts:
    """Returns all that counts, for an import under ``environ``."""
    return {
        "interpreter": f"{os.path.realpath(sys.executable)} {_file(sys.executable)}",
        "Python": sys.version,
        "prefix": f"{sys.prefix} {_file(sys.prefix)}",
        "mlaunch": f"{_version.__version__} {_file(os.path.dirname(os.path.abspath(_version.__file__)))}",
        "flags of the interpreter": " ".join(subprocess._args_from_interpreter_flags()),  # type: ignore[attr-defined]
        "priority": f"{os.getpriority(os.PRIO_PROCESS, 0)} {os.sched_getscheduler(0)} {_text('oom_score_adj')}",
        # Soft ones travel with the call; a hard limit that was lowered cannot be raised again.
        "hard limits": " ".join(str(resource.getrlimit(number)[1]) for number in _limits()),
        "personality": _text("personality"),
        **inherited(),
        "session keyring": linux.session_keyring(),
        # Rights can only be given up; memory and CPU would count for another cgroup, the login for another session.
        **_confined(),
        **{f"variable {name}": value for name, value in _variables_that_count(environ).items()},
    }


def key_of(facts: Facts) -> str:
    """Returns a name for these facts, which no others have."""
    whole = "\0".join(f"{name}\0{value}" for name, value in sorted(facts.items()))
    # The socket's name is a hash of the facts, so whoever would be refused finds nothing, and asks nobody.
    return _hash(whole)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]


def told(facts: Mapping[str, str]) -> Facts:
    """Return them as a record may have them: of a long value its beginning, and a hash of all of it."""
    return {
        name: value if len(value) <= _TOLD else f"{value[:_TOLD]}... {_hash(value)}" for name, value in facts.items()
    }


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Say what differs, one line each. ``there``: as ``told`` gives it."""
    here = told(here)
    found = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    return [f"{name}: {_apart(here.get(name), there.get(name))}" for name in found]


def foreign_entries(path: Sequence[str], base: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns what ``path`` has besides ``base``, and what it lacks of it; all of that if their order differs."""
    common = list(dict.fromkeys(entry for entry in path if entry in base))
    lacking = [entry for entry in base if entry not in path]
    # Order counts: the first of two modules with one name is imported. So a place's second entry counts for nothing.
    is_in_order = common == list(dict.fromkeys(base))
    return [entry for entry in path if entry not in base], lacking if lacking or is_in_order else list(base)


def _limits() -> list[int]:
    return sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})


def _file(path: str) -> str:
    """Says which file it is."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return f"({status.st_dev}:{status.st_ino})"
    return "(none)"


def _text(name: str) -> str:
    """Returns what the kernel says of this process; "" where it does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/self/{name}").read_text(encoding="utf-8", errors="replace").strip(" \n\0")
    return ""


def _confined() -> Facts:
    with contextlib.suppress(OSError):  # no /proc, so no fork server that is kept shows whom it serves either
        return confinement()
    return {}


def _apart(here: str | None, there: str | None) -> str:
    """Say where two values differ that do."""
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
