"""What a machine has room for, on a kernel's files that the test has written; and one real cgroup."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlaunch.agent import machine_limits
from mlaunch.agent.machine_limits import Kernel

MIB = 2**20


@pytest.fixture
def kernel(tmp_path: Path) -> Callable[..., Kernel]:
    """Makes a kernel whose files have these texts, by path below the one or the other directory."""

    def make(**files: str) -> Kernel:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Kernel(tmp_path / "proc", tmp_path / "cgroup")

    return make


def meminfo(total: int, available: int, swap: int = 0) -> str:
    """Of so many MiB."""
    figures = {"MemTotal": total, "MemFree": 1, "MemAvailable": available, "SwapFree": swap}
    return "".join(f"{name}: {1024 * figure} kB\n" for name, figure in figures.items())


@pytest.mark.parametrize(
    ("own", "place"),
    [("0::/box/job\n", "cgroup/box"), ("1:name=systemd:/\n8:cpu,pids:/job\n0::/\n", "cgroup/pids/job")],
    ids=["version 2, of the cgroup around it", "version 1"],
)
def test_a_limit_of_pids(kernel: Callable[..., Kernel], own: str, place: str) -> None:
    files = {"proc/self/cgroup": own, f"{place}/pids.max": "40\n", f"{place}/pids.current": "9\n"}
    narrow = kernel(**files, **{"cgroup/box/job/pids.max": "max\n"})
    assert machine_limits.lacks(7, kernel=narrow) == ""
    assert machine_limits.lacks(8, kernel=narrow) == (
        f"8 rank(s) need at least 32 processes and threads, but the cgroup {narrow.cgroups.parent / place} allows 40 "
        f"(pids.max), of which 9 are in use; give fewer ranks, or raise that limit"
    )
    assert machine_limits.lacks(15, script=True, kernel=narrow) == ""
    assert machine_limits.lacks(16, script=True, kernel=narrow) != ""


def test_a_machine_that_says_nothing(kernel: Callable[..., Kernel]) -> None:
    assert machine_limits.lacks(100_000, kernel=kernel()) == machine_limits.runs_short(kernel()) == ""


@pytest.mark.parametrize("root", [True, False])
def test_a_limit_of_processes(kernel: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch, root: bool) -> None:
    narrow = kernel(**{f"proc/{pid}/task/{task}/stat": "" for pid in (7, 8) for task in range(5)})
    user = os.getuid() or 65534
    if os.getuid() == 0:
        for process in narrow.proc.iterdir():
            os.chown(process, user, -1)
    monkeypatch.setattr(os, "getuid", lambda: 0 if root else user)
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (100, 200))
    assert machine_limits.lacks(22, kernel=narrow) == ""
    assert machine_limits.lacks(23, kernel=narrow) == (
        ""
        if root  # whom the kernel does not limit
        else "23 rank(s) need at least 92 processes and threads, but this user may have 100, of which 10 are in use; "
        "give fewer ranks, or raise ulimit -u, up to 200"
    )


@pytest.mark.parametrize("limit", [{}, {"cgroup/memory/job/memory.limit_in_bytes": f"{300 * MIB}\n"}])
def test_memory(kernel: Callable[..., Kernel], limit: dict[str, str]) -> None:
    has = 300 if limit else 400
    own = {"proc/self/cgroup": "4:memory:/job\n", "cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}
    small = kernel(**own, **limit, **{"proc/meminfo": meminfo(1000, 350, swap=50)})
    assert machine_limits.lacks(has // 4, kernel=small) == ""
    assert machine_limits.lacks(has // 4 + 1, kernel=small) == (
        f"{has // 4 + 1} ranks need at least {has + 4} MiB of memory before they run anything, but only {has} MiB is "
        f"available; give fewer ranks"
    )


@pytest.mark.parametrize(("total", "least"), [(1000, 50), (100_000, 1024)])
def test_memory_that_runs_short(kernel: Callable[..., Kernel], total: int, least: int) -> None:
    assert machine_limits.runs_short(kernel(**{"proc/meminfo": meminfo(total, least)})) == ""
    short = kernel(**{"proc/meminfo": meminfo(total, least - 20)})
    assert machine_limits.runs_short(short).endswith("of memory is left")
    assert machine_limits.why_no_fork(OSError(errno.ENOMEM, "No"), short) == f"No: {machine_limits.runs_short(short)}"


def test_why_no_fork(kernel: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    refused = OSError(errno.EAGAIN, "Resource temporarily unavailable")
    full = {"proc/self/cgroup": "0::/job\n", "cgroup/job/pids.max": "9\n", "cgroup/job/pids.current": "9\n"}
    said = machine_limits.why_no_fork(refused, kernel(**full))
    assert said.startswith("Resource temporarily unavailable: the cgroup ")
    assert said.endswith("/cgroup/job allows 9 processes and threads (pids.max)")
    monkeypatch.setattr(os, "getuid", lambda: 65534)
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (100, 200))
    said = machine_limits.why_no_fork(refused, Kernel(Path("/none"), Path("/none")))
    assert said == "Resource temporarily unavailable: this user may have 100 processes and threads (ulimit -u)"


def test_a_real_cgroup_that_has_no_room(run_script: Any) -> None:
    pytest.importorskip("torch")  # the rest of this file needs none
    group = Path(f"/sys/fs/cgroup/pids/mlaunch-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup of pids can be made here: {error}")
    try:
        (group / "pids.max").write_text("60")
        done = run_script(
            f"import os\nopen('{group}/cgroup.procs', 'w').write(str(os.getpid()))\n"
            f"from mlaunch import launcher\nlauncher(os.getpid, 20, device_type='cpu')()\n",
            fresh=True,
        )
    finally:
        group.rmdir()
    said = done.stderr.splitlines()[-1]
    assert said.startswith(
        f"mlaunch.errors.LaunchError: getpid() was not started: 20 rank(s) need at least 80 processes and threads, but "
        f"the cgroup {group} allows 60 (pids.max), of which "
    ), done.stderr
