"""``mlaunch doctor``: what this machine offers to launches, what would go wrong, and a text for bug reports."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from mlaunch._version import SCHEMA, __version__
from mlaunch.base import linux, own_process
from mlaunch.base.text import both_ends, in_bytes
from mlaunch.core import load
from mlaunch.protocol import registry

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


OK, NOTE, PROBLEM = "ok", "note", "problem"
_RANKS = 16  # of a large machine
_SMALL_SHM = 1 << 30  # bytes; containers often have 64 MiB, of which one DataLoader fills more
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # of version 2 and 1 of cgroups
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Finding:
    """A line of doctor. ``state``: ok, note (worth knowing) or problem (launches would fail)."""

    name: str
    state: str
    text: str


def add_command(commands: Commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="look for what would go wrong on this machine",
        description="Show what this machine offers and what would go wrong, and start two ranks. "
        "Exit status: 1 if there is a problem.",
    )
    form = doctor.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON list")
    form.add_argument("--report", nargs="?", const="", metavar="FILE", help="print a text for bug reports: versions, "
                      "limits, variables, no secrets. FILE: the output of a failed call, to be added")  # fmt: skip
    doctor.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    findings: list[Finding] = []
    lines = _told(findings)
    if args.report is not None:
        lines = report_lines(lines, os.environ, args.report or None)
    for line in lines:
        if not args.json:
            print(line, flush=True)
    if args.json:
        print(json.dumps([{"schema": SCHEMA, **asdict(finding)} for finding in findings], indent=2))
    return int(any(finding.state == PROBLEM for finding in findings))


def _told(findings: list[Finding]) -> Iterator[str]:
    """Yield a line for each finding, and keep it."""
    for finding in examine():
        findings.append(finding)
        yield f"{finding.state:<8} {finding.name:<12} {finding.text}"


def examine() -> Iterator[Finding]:
    """Yield one finding after the other, the quick ones first."""
    yield Finding("mlaunch", OK, f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    yield _kernel()
    yield _cpus()
    yield _memory()
    yield _shared_memory()
    yield _open_files()
    yield _runtime_directory()
    yield _network()
    yield from (Finding(name, OK if is_well else NOTE, text) for name, is_well, text in load.findings())
    yield from _launches()


def _kernel() -> Finding:
    try:
        linux.check_kernel()
    except OSError as error:
        return Finding("kernel", PROBLEM, str(error))
    return Finding("kernel", OK, f"Linux {platform.release()} allows the system calls that launches make")


def _cpus() -> Finding:
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return Finding("cpus", OK, f"{usable} usable" + (f" of {there}" if usable != there else ""))


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in _LIMITS:
        try:
            limit = int((Path("/sys/fs/cgroup") / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not there, or "max"
            continue
        if limit < min(total, _NO_LIMIT):
            return Finding("memory", NOTE, f"{in_bytes(total)}, of which the cgroup allows {in_bytes(limit)}")
    return Finding("memory", OK, in_bytes(total))


def _shared_memory() -> Finding:
    try:
        status = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding("/dev/shm", PROBLEM, f"{error}; DataLoader workers and NCCL need it")
    free = status.f_bavail * status.f_frsize
    if free < _SMALL_SHM:
        advice = "DataLoader workers and NCCL use it; in a container give more (docker run --shm-size=8g)"
        return Finding("/dev/shm", NOTE, f"only {in_bytes(free)} free: {advice}")
    return Finding("/dev/shm", OK, f"{in_bytes(free)} free")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = f"{soft} (hard limit {hard})"
    if lacks := own_process.too_few_files(_RANKS):
        return Finding("open files", PROBLEM, f"{shown}: {lacks}")
    return Finding("open files", OK, f"{shown}: enough for {_RANKS} ranks")


def _runtime_directory() -> Finding:
    try:
        # Tried: rights, free space and the length of a socket's path all count.
        registry.listen(os.environ, f"doctor-{os.getpid()}").close()
    except OSError as error:
        return Finding("mlaunch ps", NOTE, f"launches cannot be listed: {error}")
    finally:
        registry.remove(os.environ, f"doctor-{os.getpid()}")
    return Finding("mlaunch ps", OK, f"launches are listed in {registry.home(os.environ)}")


def _network() -> Finding:
    name = socket.gethostname()
    interfaces = ", ".join(interface for _, interface in socket.if_nameindex())
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Finding("network", NOTE, f"{interfaces}; this host's name {name} does not resolve ({error})")
    if address.startswith("127."):
        advice = "give other machines an address as master_ip"
        return Finding("network", NOTE, f"{interfaces}; this host's name {name} means {address} here: {advice}")
    return Finding("network", OK, f"{interfaces}; this host is {name}, {address}")


def _launches() -> Iterator[Finding]:
    """Yield findings of two ranks: what torch offers, and how long a launch takes."""
    from mlaunch.caller.launcher import launcher

    look: Callable[[], dict[str, Any]] = _look_around
    start = time.monotonic()
    try:
        # On CPUs: devices may be in use; a rank asks for them, since that may wake the driver.
        launcher(look, n_gpus=2, device_type="cpu", join=False, deadline=120)()
        first = time.monotonic() - start
        start = time.monotonic()
        found = launcher(look, n_gpus=2, device_type="cpu", join=False, deadline=120)()[0]
        again = time.monotonic() - start
    except Exception as error:  # whatever keeps torch from running here
        yield Finding("launch", PROBLEM, f"two ranks on CPUs failed: {error}")
        return
    yield Finding("torch", OK, f"{found['torch']}; backends {', '.join(found['backends'])}")
    yield from (Finding("torch", NOTE, lack) for lack in found["lacks"])
    yield _devices(found)
    yield Finding("launch", OK, f"two ranks on CPUs: {first:.1f} s with the fork server's start, then {again:.3f} s")


def _devices(found: dict[str, Any]) -> Finding:
    shown = {name: value for name, value in os.environ.items() if name.endswith("_VISIBLE_DEVICES")}
    variables = "".join(f", {name}={value}" for name, value in shown.items())
    if found["accelerator"] is None:
        return Finding("devices", OK, f"this torch is built for CPUs only{variables}")
    text = f"{found['devices']} {found['accelerator']} visible{variables}; {found['versions']}"
    if found["error"]:
        return Finding("devices", PROBLEM, f"{text}; {found['error']}")
    return Finding("devices", OK if found["devices"] else NOTE, text)


def _look_around() -> dict[str, Any]:
    """Return what torch offers; in a rank, since it may wake the driver."""
    import torch

    from mlaunch.rank import device
    from mlaunch.torch_parts import lacking

    offered = device.offered()
    found: dict[str, Any] = {
        "torch": offered.torch_version,
        "backends": offered.backends,
        "accelerator": offered.accelerator,
        "devices": 0,
        "versions": "",
        "error": "",
        "lacks": lacking.everything(),
    }
    try:
        found["devices"] = torch.accelerator.device_count()
        if offered.accelerator == "cuda":
            version: Any = torch.cuda.nccl.version  # torch leaves it untyped
            nccl = ".".join(map(str, version()))
            found["versions"] = f"CUDA {torch.version.cuda}, NCCL {nccl}"
    except Exception as error:  # whatever a driver may raise
        found["error"] = f"{type(error).__name__}: {error}"
    return found


# ``--report``: facts for bug reports, without secrets

_HEAD = """\
Report of mlaunch doctor, to be pasted where you ask for help. Values of variables that may be secrets are left out, and
your home directory is "~". Names of hosts, paths and scripts are in it: read it before you give it to others.
"""
_NO_FAILURE = """\
None was given. Where you made the call, print(train.last) shows its report, and a failed call has printed another one.
Paste both below, or put them into a file and run: mlaunch doctor --report FILE
"""
_PACKAGES = ("torch", "cloudpickle", "numpy", "ipykernel", "IPython", "rich", "tqdm", "ray", "uvloop")
_RLIMITS = {
    "open files": "RLIMIT_NOFILE",
    "processes": "RLIMIT_NPROC",
    "address space": "RLIMIT_AS",
    "locked memory": "RLIMIT_MEMLOCK",
    "file size": "RLIMIT_FSIZE",
    "stack": "RLIMIT_STACK",
}
_CGROUP_FILES = ("memory.max", "memory.swap.max", "cpu.max", "pids.max", "cpuset.cpus.effective")
_OF_INTEREST = re.compile(
    r"(MLAUNCH|CUDA|NVIDIA|NCCL|GLOO|UCC|TORCH|TORCHELASTIC|PYTORCH|PYTHON|OMP|MKL|KMP|SLURM|SBATCH|SALLOC|OMPI|PMI|PMIX"
    r"|HIP|ROCR|ZE|ASCEND|MASTER|LD|LC|CONDA)_\w+"
    r"|PYTHON\w+|RANK|LOCAL_RANK|WORLD_SIZE|VIRTUAL_ENV|TMPDIR|XDG_RUNTIME_DIR|LANG|TERM|MPLBACKEND"
)
_MOST_OF_FAILURE = 65536  # bytes of a call's output


def report_lines(findings: Iterator[str], environ: Mapping[str, str], failure: str | None) -> Iterator[str]:
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
    text = [_HEAD]
    for title, lines in parts.items():
        text += [f"{title}\n{'-' * len(title)}", *lines, ""]
    # In one piece: a key has several lines.
    yield without_secrets("\n".join(text), environ)


def _read(path: str, environ: Mapping[str, str]) -> str:
    # Before it is cut: half of a secret would not be recognised.
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    return both_ends(without_secrets(text, environ), _MOST_OF_FAILURE)


def _versions() -> Iterator[str]:
    yield f"Python {sys.version}"
    yield f"mlaunch {__version__}"
    for name in _PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _limits() -> Iterator[str]:
    for name, constant in _RLIMITS.items():
        soft, hard = (_number(limit) for limit in resource.getrlimit(getattr(resource, constant)))
        yield f"{name}: {soft} (hard: {hard})"
    for directory in _cgroups():
        for name in _CGROUP_FILES:
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


# Secrets: values of secret variables, logins, and strings that look like tokens

_IN_NAMES = re.compile(
    r"TOKEN|KEY|SECRET|PASS|JWT|CREDENTIAL|AUTH|COOKIE|PRIVATE|SIGNATURE|WEBHOOK|BEARER|OTP|CERT|DSN|CONN(ECTION)?_?STR"
    r"|(^|_)(PAT|PWD|PW|PSK|SAS|PIN|SALT|SESSION|SID|MNEMONIC|SEED_PHRASE|LICENSE)(_|$)",
    re.IGNORECASE,
)
_NO_SECRETS = {"PWD", "OLDPWD", "XDG_SESSION_ID", "XDG_SESSION_TYPE", "XDG_SESSION_CLASS", "DESKTOP_SESSION"}
_USUAL = {"true", "false", "none", "null", "yes", "no", "on", "off", "auto", "default"}
_SHORT, _SHORTEST = 6, 3  # characters: a shorter one is replaced only as a whole word; below 3 not at all
_WORDS = (
    r"(?:pass(?:word|wd|phrase)?|pwd|(?:[a-z]+[_-])?(?:token|secret|pat|sig|signature|credential)"
    r"|(?:api|access|account|shared|private|secret)[_-]?key)"
)
_SHAPES = (
    # Logins in addresses, up to the last @: passwords have some, and slashes.
    (re.compile(r"""(?<=://)(?:[^\s/?#"']*|[^\s/:@"']*:[^\s"']*)@"""), "(login)@"),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)", re.DOTALL), "(private key)"),
    (re.compile(r"\b(Bearer|Basic|Digest) +[\w+/.=~-]{6,}", re.IGNORECASE), r"\1 (hidden)"),
    (re.compile(rf"""(?<![a-z])({_WORDS})(["']?\s*[=:]\s*["']?)[^\s"'&,;)]{{3,}}""", re.IGNORECASE), r"\1\2(hidden)"),
    # As GitHub, GitLab, Hugging Face, OpenAI, Slack, AWS, Google, npm, PyPI and JWT write them.
    (
        re.compile(
            r"\b(?:gh[pousr]_\w{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}|hf_\w{8,}|sk-[\w-]{8,}|xox[a-z]-[\w-]{8,}"
            r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{20,}|npm_\w{8,}|pypi-[\w-]{8,}|eyJ[\w-]+\.[\w-]+\.[\w-]*)"
        ),
        "(token)",
    ),
)


def is_secret(name: str) -> bool:
    """True if the variable of this name may hold a secret."""
    return name not in _NO_SECRETS and _IN_NAMES.search(name) is not None


def without_secrets(text: str, environ: Mapping[str, str]) -> str:
    """Return a text without what the environment keeps secret, without logins and tokens, and without the home."""
    forms = ((form, name) for name, value in environ.items() if is_secret(name) for form in _forms(value))
    found = {form: name for form, name in forms if form in text}
    if found:
        # Longest first, and in one pass: one may be the beginning of another, or stand in the name of another.
        either = "|".join(map(_pattern, sorted(found, key=len, reverse=True)))
        text = re.sub(either, lambda match: f"({found[match[0]]})", text)
    for pattern, instead in _SHAPES:
        text = pattern.sub(instead, text)
    home = environ.get("HOME", "")
    return re.sub(rf"{re.escape(home)}(?=/|\W|$)", "~", text) if len(home) > 1 else text


def _forms(value: str) -> Iterator[str]:
    """Yield how a value may stand in a text: whole, quoted, and line by line, as a log shows it."""
    quoted = quote(value, safe=""), value.encode("unicode_escape").decode()
    for form in map(str.strip, (value, *quoted, *value.split("\n"))):
        if len(form) >= _SHORTEST and form.lower() not in _USUAL and not (form.isdecimal() and len(form) < _SHORT):
            yield form


def _pattern(form: str) -> str:
    # A short one is part of many words, which would become unreadable.
    return re.escape(form) if len(form) >= _SHORT else rf"(?<!\w){re.escape(form)}(?!\w)"
