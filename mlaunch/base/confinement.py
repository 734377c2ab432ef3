"""The confinement of a process by the kernel: namespaces, root, credentials, and rights that it has given up."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

Confinement = dict[str, str]  # by the words that a person is shown

_SETS = ("Gid", "Groups")  # rows of /proc/PID/status: numbers that give rights
_CAPABILITIES = ("CapPrm", "CapEff", "CapBnd")
_FILTERS = ("NoNewPrivs", "Seccomp", "Seccomp_filters")
_ROWS = (
    "Uid", *_SETS, "CapInh", *_CAPABILITIES, "CapAmb", *_FILTERS, "Cpus_allowed_list", "Mems_allowed_list"
)  # fmt: skip
# The accounts that its work is counted for, which give no rights.
_ACCOUNTS = {"cgroup": "cgroup", "login": "loginuid", "login session": "sessionid"}
_MOST = 65_536
_FEWER = "it has fewer rights"


def confinement(process: int | str = "self") -> Confinement:
    """Return the confinement of a process, from /proc.

    Raises:
        OSError: There is no such process, or the kernel does not show it: it has another user's rights, more rights
            than this one, or is outside of the Landlock domain that this one is in.
    """
    place = f"/proc/{process}"
    root = os.stat(f"{place}/root")
    namespaces = {f"namespace {name}": os.readlink(f"{place}/ns/{name}") for name in sorted(os.listdir(f"{place}/ns"))}
    rows = (line.partition(":") for line in read(f"{place}/status").splitlines())
    return {
        "root directory": f"({root.st_dev}:{root.st_ino})",
        "security label": _text(f"{place}/attr/current"),
        **namespaces,
        **{f"status {name}": value.strip() for name, _, value in rows if name in _ROWS},
        **{name: _text(f"{place}/{file}") for name, file in _ACCOUNTS.items()},
    }


def read(path: str) -> str:
    """Return the content of a file of /proc, up to 64 KiB. OSError: there is none, or it is not shown."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # not by Path, which takes five times as long
    try:
        return os.read(fd, _MOST).decode("utf-8", "replace")
    finally:
        os.close(fd)


def is_filtered(found: Mapping[str, str]) -> bool:
    """True if it has no_new_privs or a seccomp filter, so it may be in a sandbox that /proc does not show."""
    return any(found.get(f"status {name}", "0") != "0" for name in _FILTERS)


def rights_lacking(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Return what a process may not do that this one may, in words; "" if it has all the rights that this one has."""
    for name, value in ours.items():
        is_place = name.startswith("namespace") or name in {"root directory", "security label", "status Uid"}
        if is_place and theirs.get(name) != value:
            return f"its {name.removeprefix('status ')} is another"
    if not _numbers(ours) <= _numbers(theirs):
        return f"{_FEWER}: it lacks a group"
    for name in _CAPABILITIES:
        if _hexadecimal(ours, name) & ~_hexadecimal(theirs, name):
            return f"{_FEWER}: it lacks a capability ({name})"
    for name in _FILTERS:
        if int(theirs.get(f"status {name}", "0")) > int(ours.get(f"status {name}", "0")):
            return f"{_FEWER}: {name} is set"
    return ""


def _numbers(found: Mapping[str, str]) -> set[str]:
    return {number for name in _SETS for number in found.get(f"status {name}", "").split()}


def _hexadecimal(found: Mapping[str, str], name: str) -> int:
    return int(found.get(f"status {name}", "0"), 16)


def _text(path: str) -> str:
    """Return the file's content; "" where this kernel has no such file, or does not show it."""
    with contextlib.suppress(OSError):
        return read(path).strip(" \n\0")
    return ""
