"""``mlaunch doctor --report``: facts about a machine for bug reports, without secrets."""

from __future__ import annotations

import importlib.metadata
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from mlaunch._version import __version__
from mlaunch.base.text import both_ends
from mlaunch.cli.secrets_in_text import is_secret, without_secrets

_FIRST = """\
Report of mlaunch doctor, to be pasted where you ask for help. Values of variables that may be secrets are left out, and
your home directory is "~". Names of hosts, paths and scripts are in it: read it before you give it to others.
"""
_NO_FAILURE = """\
None was given. In the process that made the call, print(train.last) shows its report, and a failed call has printed
another one: put both below, or into a file, and give its name: mlaunch doctor --report FILE
"""
_PACKAGES = ("torch", "cloudpickle", "numpy", "ipykernel", "IPython", "rich", "tqdm", "ray", "uvloop")
_LIMITS = {
    "open files": "RLIMIT_NOFILE",
    "processes": "RLIMIT_NPROC",
    "address space": "RLIMIT_AS",
    "locked memory": "RLIMIT_MEMLOCK",
    "file size": "RLIMIT_FSIZE",
    "stack": "RLIMIT_STACK",
}
_CGROUP = ("memory.max", "memory.swap.max", "cpu.max", "pids.max", "cpuset.cpus.effective")
_OF_INTEREST = re.compile(
    r"(MLAUNCH|CUDA|NVIDIA|NCCL|GLOO|UCC|TORCH|TORCHELASTIC|PYTORCH|PYTHON|OMP|MKL|KMP|SLURM|SBATCH|SALLOC|OMPI|PMI|PMIX"
    r"|HIP|ROCR|ZE|ASCEND|MASTER|LD|LC|CONDA)_\w+"
    r"|PYTHON\w+|RANK|LOCAL_RANK|WORLD_SIZE|VIRTUAL_ENV|TMPDIR|XDG_RUNTIME_DIR|LANG|TERM|MPLBACKEND"
)
_FAILURE = 65536  # bytes of a call's output


def write(findings: Iterator[str], environ: Mapping[str, str], failure: str | None) -> Iterator[str]:
    """Yield the report. ``findings``: doctor's lines; ``failure``: the file of a call's output.

    Raises:
        OSError: The file that ``failure`` names cannot be read.
    """
    told = _NO_FAILURE if failure is None else _read(failure, environ)
    parts = {
        "Versions": _versions(),
        "Machine": findings,
        "Limits": _limits(),
        "Variables": _variables(environ),
        "The last report": iter(told.splitlines()),
    }
    text = [_FIRST]
    for title, lines in parts.items():
        text += [f"{title}\n{'-' * len(title)}", *lines, ""]
    # In one piece: a key has several lines.
    yield without_secrets("\n".join(text), environ)


def _read(path: str, environ: Mapping[str, str]) -> str:
    # Before it is cut: half of a secret would not be recognised.
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    return both_ends(without_secrets(text, environ), _FAILURE)


def _versions() -> Iterator[str]:
    yield f"Python {sys.version}"
    yield f"mlaunch {__version__}"
    for name in _PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _limits() -> Iterator[str]:
    for name, constant in _LIMITS.items():
        soft, hard = (_number(limit) for limit in resource.getrlimit(getattr(resource, constant)))
        yield f"{name}: {soft} (hard: {hard})"
    for directory in _cgroups():
        for name in _CGROUP:
            path = directory / name
            if path.is_file():
                yield f"cgroup {path}: {path.read_text(encoding='utf-8').strip()}"


def _cgroups() -> Iterator[Path]:
    """Yield the directory of this process's cgroup and those above it, which limit it, too."""
    mine = next((line[3:] for line in _lines("/proc/self/cgroup") if line.startswith("0::")), "/")
    root = Path("/sys/fs/cgroup")
    place = root / mine.lstrip("/")
    yield from (step for step in (place, *place.parents) if step == root or root in step.parents)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:  # not mounted
        return []


def _number(limit: int) -> str:
    return "none" if limit == resource.RLIM_INFINITY else str(limit)


def _variables(environ: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(environ):
        if is_secret(name):
            if name.startswith("MLAUNCH_"):
                yield f"{name} is set, and not shown"
        elif _OF_INTEREST.fullmatch(name):
            yield f"{name}={environ[name]}"
    yield f"{len(environ)} variables in all"
