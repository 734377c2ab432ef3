"""``mlaunch doctor``: what this machine offers to launches, and what would go wrong."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlaunch._version import SCHEMA, __version__
from mlaunch.base import linux, own_process
from mlaunch.base.text import in_bytes
from mlaunch.cli import bug_report
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
                      "limits, variables, no secrets. FILE: what a failed call has printed, to be added")  # fmt: skip
    doctor.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    findings: list[Finding] = []
    lines = _told(findings)
    if args.report is not None:
        lines = bug_report.write(lines, os.environ, args.report or None)
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
    yield from _of_features()
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


def _of_features() -> Iterator[Finding]:
    """Yield the findings of features."""
    for name, is_well, text in load.findings():
        yield Finding(name, OK if is_well else NOTE, text)


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

    from mlaunch.rank.setup import device
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
