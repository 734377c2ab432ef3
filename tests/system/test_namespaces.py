"""Callers whose /proc is another's or missing: what ranks leave is found or left alone, and launches work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.users import users_environ

LIMIT = 120  # seconds

SCRIPT = """
import os, signal, sys, time
import torch  # once, rather than in each fork
from mlaunch import LaunchError, launcher

def leaves_a_daemon(note):
    import torch.distributed as dist
    if dist.get_rank() == 0 and os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(note, "w") as file:
                file.write(str(os.getpid()))
            signal.pause()
        os._exit(0)
    while not (os.path.exists(note) and os.path.getsize(note)):
        os.sched_yield()
    dist.barrier()
    return os.environ["RANK"]

def fails():
    raise ValueError("no such luck")

def dies():
    os.kill(os.getpid(), signal.SIGKILL)

def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

def state():
    note = f"{sys.argv[1]}/{method}"
    values = launcher(leaves_a_daemon, 2, start_method=method)(note)
    with open(note) as file:
        return values, alive(int(file.read()))

for method in ("forkserver", "fork"):
    print(method, *state())
    try:
        launcher(fails, 2, start_method=method)()
    except ValueError as error:
        print(error)
    try:
        launcher(dies, 2, start_method=method)()
    except LaunchError as error:
        print("killed by SIGKILL" in str(error))
    assert launcher(len, 2, start_method=method)("four") == [4, 4]
print("over", flush=True)
"""
STRANGERS = 40


def in_namespaces(directory: Path, *command: str, script: str = SCRIPT) -> list[str]:
    """What the script prints in namespaces that a command makes."""
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    (directory / "script.py").write_text(script)
    done = subprocess.run(
        [*command, sys.executable, str(directory / "script.py"), str(directory)],
        env={**users_environ(), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    if "unshare failed" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip(f"no namespaces can be made here: {done.stderr}")
    assert done.stdout.endswith("over\n"), done.stderr
    return done.stdout.splitlines()


@pytest.mark.nightly
@pytest.mark.slow
def test_the_outer_proc(tmp_path: Path) -> None:
    """The numbers in /proc are not those of this namespace: those of strangers, here."""
    strangers = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(STRANGERS)]
    try:
        said = in_namespaces(tmp_path, "unshare", "--pid", "--fork")
        assert [stranger.poll() for stranger in strangers] == [None] * STRANGERS
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()
    assert said[:3] == ["forkserver ['0', '1'] False", "no such luck", "True"]
    assert said[3:6] == ["fork ['0', '1'] False", "no such luck", "True"]


@pytest.mark.nightly
@pytest.mark.slow
def test_no_proc(tmp_path: Path) -> None:
    """A daemon cannot be found there and is left to whoever reaps it, rather than looked for without end."""
    if os.getuid() != 0:
        pytest.skip("needs root")
    said = in_namespaces(
        tmp_path, "unshare", "--mount", "--pid", "--fork", "sh", "-c", 'umount -l /proc && exec "$0" "$@"'
    )
    assert said[0].startswith("forkserver ['0', '1']")
    assert said[1:3] == ["no such luck", "True"]
    assert said[3].startswith("fork ['0', '1']")
    assert said[4:6] == ["no such luck", "True"]


FULL = """
from mlaunch import launcher

try:
    open("/dev/shm/rest", "w").write("x" * 100_000)
except OSError as error:
    print(error.strerror)
print(launcher(sum, 2)([1, 2]), flush=True)
print("over", flush=True)
"""


def test_a_full_dev_shm(tmp_path: Path) -> None:
    """A launch needs no file there."""
    mount = "mount -t tmpfs -o size=16k full /dev/shm"
    said = in_namespaces(tmp_path, "unshare", "--mount", "sh", "-c", f'{mount} && exec "$0" "$@"', script=FULL)
    assert said == ["No space left on device", "[3, 3]", "over"]


DOWN = """
import sys
from mlaunch import LaunchError, launcher

for method in ("forkserver", "fork"):
    try:
        launcher(sum, 2, start_method=method)([1, 2])
    except LaunchError as error:
        print(error)
print("over", flush=True)
"""


@pytest.mark.nightly
def test_loopback_that_is_down(tmp_path: Path) -> None:
    """No rank is started."""
    why = "the ranks of a machine meet at 127.0.0.1, which cannot be reached (Network is unreachable): its loopback "
    said = in_namespaces(tmp_path, "unshare", "--net", script=DOWN)
    assert [line.partition("interface")[0] for line in said] == [f"sum() was not started: {why}"] * 2 + ["over"]
    up = "ip link set lo up"
    said = in_namespaces(tmp_path, "unshare", "--net", "sh", "-c", f'{up} && exec "$0" "$@"', script=DOWN)
    assert said == ["over"]
