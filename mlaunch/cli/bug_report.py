"""``mlaunch doctor --report``: facts about a machine for bug reports, without secrets."""

from __future__ import annotations

import importlib.metadata
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

from mlaunch._version import __version__
from mlaunch.base.text import both_ends

_FIRST = """\
Report of mlaunch doctor, to be pasted where you ask for help. Values of variables that may be secrets are left out, and
your home directory is "~". Names of hosts, paths and scripts are in it: read it before you give it to others.
"""
_NO_FAILURE = """\
None was given. Where you made the call, print(train.last) shows its report, and a failed call has printed another one.
Paste both below, or put them into a file and run: mlaunch doctor --report FILE
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


# Secrets: values of secret variables, logins, and strings that look like tokens

_IN_NAMES = re.compile(
    r"TOKEN|KEY|SECRET|PASS|JWT|CREDENTIAL|AUTH|COOKIE|PRIVATE|SIGNATURE|WEBHOOK|BEARER|OTP|CERT|DSN|CONN(ECTION)?_?STR"
    r"|(^|_)(PAT|PWD|PW|PSK|SAS|PIN|SALT|SESSION|SID|MNEMONIC|SEED_PHRASE|LICENSE)(_|$)",
    re.IGNORECASE,
)
_NO_SECRETS = {"PWD", "OLDPWD", "XDG_SESSION_ID", "XDG_SESSION_TYPE", "XDG_SESSION_CLASS", "DESKTOP_SESSION"}
_USUAL = {"true", "false", "none", "null", "yes", "no", "on", "off", "auto", "default"}
_SHORT, _SHORTEST = 6, 3  # characters: what is shorter is sought as a word, and not at all
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
    # A short one stands in many words, which would become unreadable.
    return re.escape(form) if len(form) >= _SHORT else rf"(?<!\w){re.escape(form)}(?!\w)"
