"""A fork server that outlives its caller: ``mlaunch warm``, and who gets forks of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from mlaunch.base import linux
from mlaunch.base.confinement import confinement, is_filtered
from mlaunch.caller.server import zygote_upkeep
from mlaunch.cli import main
from mlaunch.protocol import import_facts, registry
from mlaunch.protocol.messages.zygote_messages import ZygoteState
from tests import builds
from tests.conftest import ROOT
from tests.imported import IMPORTED
from tests.processes import alive, wait_gone, wait_until
from tests.system.commands import environment, run, start, write

WARM = [IMPORTED, "-m", "mlaunch", "warm"]
SAY = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], flush=True)"
DECORATED = """
import os
from mlaunch import Ranks, launcher
print(len(launcher(os.getpid, n_gpus=1)()))
with Ranks(n_gpus=2, device_type="cpu") as ranks:
    print(len(ranks.run(os.getpid)))
"""
TESTED = """
import pytest
@pytest.mark.ranks(2)
def test_this():
    assert True
"""
# What a process has from whoever started it: as it is without, so it must be in a rank of a warm fork server.
PROBE = """
import json, locale, os, re, resource, signal, sys, warnings
def text(name):
    with open(f"/proc/self/{name}", errors="replace") as file:
        return file.read()
rank, out = os.environ["RANK"], os.environ["OUT"]
status = dict(line.split(":", 1) for line in text("status").splitlines())
its_own = "Vm|Rss|FDSize|SigQ|P?Pid|Tgid|NS|.*volunt"
found = {name: value for name, value in status.items() if not re.match(its_own, name)}
stat = text("stat").rpartition(")")[2].split()
found |= {f"stat {i}": stat[i] for i in (4, 5, 15, 16, 17, 35, 37, 38)}
found |= {name: text(name) for name in ("limits", "cgroup", "personality", "oom_score_adj", "timerslack_ns")}
found["leads"] = os.getpgrp() == os.getpid() == os.getsid(0)
found["streams"] = [re.sub(r"\\d+", "N", os.readlink(f"/proc/self/fd/{fd}")) for fd in range(3)]
found["open"] = sorted(re.sub(r"\\d+", "N", os.readlink(f"/proc/self/fd/{fd}")) for fd in map(int, os.listdir(
    "/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}"))
own = {"MASTER_PORT", "MLAUNCH_RANK_PID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "MLAUNCH_WARM", "OUT"}
found["environ"] = {name: value for name, value in os.environ.items() if name not in own}
found["place"] = [os.getcwd(), sys.path, sys.argv, str(sys.flags), locale.setlocale(locale.LC_ALL)]
found["signals"] = [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())][:31]
found["filters"] = list(map(str, warnings.filters))
found["encodings"] = [(stream.encoding, stream.errors) for stream in (sys.stdin, sys.stdout, sys.stderr)]
with open(f"{out}-{rank}", "w") as file:
    json.dump(found, file)
"""


@pytest.fixture(autouse=True)
def one_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container with a filter, as Docker's are, a kept server serves nobody unless that is said."""
    if is_filtered(confinement()):
        monkeypatch.setenv(import_facts.SANDBOX, "1")


def warm(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return run(ROOT, *words, command=WARM, **changes)


def kept() -> list[ZygoteState]:
    return zygote_upkeep.states(os.environ)


@pytest.fixture
def zygote() -> Iterator[ZygoteState]:
    """One that is kept, and none afterwards."""
    done = warm("--for", "20m")
    assert done.returncode == 0, done.stderr
    (state,) = kept()
    assert re.search(rf"a fork server \(pid {state.pid}\) that has imported torch is kept until 20 min", done.stdout)
    with contextlib.suppress(ProcessLookupError):
        yield state
    zygote_upkeep.end_all(os.environ)
    assert not alive(state.pid)


def test_a_command_a_script_ranks_that_stay_and_tests_get_forks(zygote: ZygoteState, tmp_path: Path) -> None:
    done = run(tmp_path, "--nproc-per-node", "2", write(tmp_path, SAY), MLAUNCH_DEBUG="1")
    assert sorted(done.stdout.splitlines()) == ["0 2", "1 2"]
    assert re.search(rf"the fork server is a fork \(pid \d+\) of the warm one \(pid {zygote.pid}\)", done.stderr)
    path = write(tmp_path, DECORATED, "decorated.py")
    done = run(tmp_path, path, command=[IMPORTED])
    assert (done.stdout, builds.without_gloo(done.stderr)) == ("1\n2\n", "")
    path = write(tmp_path, TESTED, "test_on_ranks.py")
    is_found = entry_points(group="pytest11", name="mlaunch")  # not in a root in which mlaunch was not installed
    plugin = [] if is_found else ["-p", "mlaunch.pytest.plugin"]
    done = run(tmp_path, "-m", "pytest", *plugin, "-q", "-p", "no:cacheprovider", path, command=[IMPORTED])
    assert "1 passed" in done.stdout
    wait_until(lambda: kept()[0].serving == 0)
    assert [(state.pid, state.served) for state in kept()] == [(zygote.pid, 3)]


@pytest.mark.slow
@pytest.mark.usefixtures("zygote")
def test_a_rank_is_as_without(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    script = str(tmp_path / write(tmp_path, PROBE))
    found = {}
    for name, warm_or_not in (("without", "0"), ("with", "")):
        changes = {"MLAUNCH_WARM": warm_or_not, "OUT": str(tmp_path / name)}
        done = run(folder, "--nproc-per-node", "2", script, "--lr", "1", **changes)
        assert done.returncode == 0, done.stderr
        found[name] = [json.loads((tmp_path / f"{name}-{rank}").read_text()) for rank in range(2)]
    for with_it, without in zip(found["with"], found["without"], strict=True):
        assert {name: (with_it[name], value) for name, value in without.items() if with_it[name] != value} == {}
    assert kept()[0].served == 1


def test_a_fork_ends_with_its_caller(zygote: ZygoteState, tmp_path: Path) -> None:
    """Also a fork server that somebody has stopped."""
    script = write(tmp_path, "import os, time; print(os.getppid(), flush=True); time.sleep(600)")
    for stopped in (False, True):
        command = start(tmp_path, script)
        assert command.stdout is not None
        agent = int(command.stdout.readline())
        server = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
        assert int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1]) == zygote.pid
        if stopped:
            os.kill(server, signal.SIGSTOP)
        command.kill()
        command.communicate()
        wait_gone([agent, server])
    wait_until(lambda: kept()[0].serving == 0)


def test_a_fork_server_that_is_killed_is_told(zygote: ZygoteState, tmp_path: Path) -> None:
    script = write(tmp_path, "import os, time; print(os.getppid(), flush=True); time.sleep(600)")
    command = start(tmp_path, script)
    assert command.stdout is not None
    agent = int(command.stdout.readline())
    server = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGKILL)
    _, told = command.communicate(timeout=60)
    assert f"(pid {server})" in told
    assert command.returncode == 1
    wait_gone([agent])
    assert [state.pid for state in kept()] == [zygote.pid]


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_kept_server_that_does_not_answer_is_replaced(zygote: ZygoteState, tmp_path: Path, how: str) -> None:
    os.kill(zygote.pid, signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    wait_until(lambda: not alive(zygote.pid) or linux.is_stopped(zygote.pid))
    done = run(tmp_path, write(tmp_path, SAY))
    assert (done.stdout, done.returncode) == ("0 1\n", 0)
    assert not alive(zygote.pid)
    assert kept() == []
    assert list(registry.home(os.environ).glob("*.warm")) == []


def test_a_kept_server_ends_when_its_socket_is_removed(zygote: ZygoteState) -> None:
    (path,) = registry.home(os.environ).glob("*.warm")
    path.unlink()
    wait_gone([zygote.pid])


def test_a_kept_server_ends_by_itself_after_some_time() -> None:
    done = warm("--for", "0.2s")
    (pid,) = map(int, re.findall(r"\(pid (\d+)\)", done.stdout))
    wait_gone([pid])
    assert kept() == []


def test_a_kept_server_ends_when_a_file_changes_that_it_has_imported(tmp_path: Path) -> None:
    library = tmp_path / "warm_library.py"
    library.write_text("version = 1")
    script = write(tmp_path, "import warm_library; print(warm_library.version)", "script.py")
    changes = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "MLAUNCH_DEBUG": "1"}
    try:
        warm("--preload", "warm_library", **changes)
        (state,) = kept()
        assert run(tmp_path, script, **changes).stdout == "1\n"
        library.write_text("version = 'two'")
        done = run(tmp_path, script, **changes)
        assert done.stdout == "two\n"
        assert f"of no use: {library} has changed since it was imported" in done.stderr
        wait_gone([state.pid])
    finally:
        zygote_upkeep.end_all(os.environ)


def test_two_that_start_become_one() -> None:
    commands = [
        subprocess.Popen(WARM, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        told = [command.communicate(timeout=120) for command in commands]
        assert [command.returncode for command in commands] == [0, 0], told
        (state,) = kept()
        assert {re.findall(r"pid (\d+)", out)[0] for out, _ in told} == {str(state.pid)}
    finally:
        zygote_upkeep.end_all(os.environ)


@pytest.mark.usefixtures("zygote")
def test_callers_that_a_kept_server_does_not_serve(tmp_path: Path) -> None:
    """Whoever imports something else under a name that it has, or under other variables, has a fork server alone."""
    (tmp_path / "sympy.py").write_text("")
    done = run(tmp_path, write(tmp_path, SAY), MLAUNCH_DEBUG="1", OPENBLAS_VERBOSE="0")
    assert "variable OPENBLAS_VERBOSE: here '0', there not set" in done.stderr
    (tmp_path / "typing_extensions.py").write_text("from enum import *")
    done = run(tmp_path, write(tmp_path, SAY), MLAUNCH_DEBUG="1")
    assert f"{tmp_path}/typing_extensions would be imported in place of the library typing_extensions" in done.stderr
    assert kept()[0].served == 0


def test_variables_of_the_shell_that_keeps_one(tmp_path: Path) -> None:
    """Modules may read them while they are imported; no later process has them, and the token nobody."""
    write(tmp_path, "import os; found = [os.environ.get(n) for n in ('HF_HOME', 'MLAUNCH_TOKEN')]", "lib/reads.py")
    look = "import os, reads; print(reads.found, os.environ.get('HF_HOME'), open('/proc/self/environ').read())"
    path = f"{ROOT}:{tmp_path}/lib"
    try:
        shell = {"HF_HOME": "/of/the/shell", "AWS_SECRET": "secret", "MLAUNCH_TOKEN": "token"}
        command = [sys.executable, "-m", "mlaunch", "warm"]  # whose environment is what it was given
        begun = run(ROOT, "--preload", "reads", command=command, PYTHONPATH=path, **shell)
        assert begun.returncode == 0, begun.stderr
        done = run(tmp_path, write(tmp_path, look), PYTHONPATH=path, MLAUNCH_DEBUG="1")
        assert done.stdout.startswith("['/of/the/shell', None] None "), done.stderr
        (state,) = kept()
        assert state.served == 1
        for text in (done.stdout, Path(f"/proc/{state.pid}/environ").read_text()):
            assert f"PYTHONPATH={path}" in text
            assert not re.search("AWS_SECRET|MLAUNCH_TOKEN|HF_HOME=", text)
    finally:
        zygote_upkeep.end_all(os.environ)


def test_a_server_is_left_where_that_is_wanted(tmp_path: Path) -> None:
    try:
        assert run(tmp_path, write(tmp_path, SAY), MLAUNCH_WARM="20m").stdout == "0 1\n"
        wait_until(lambda: bool(kept()))
        assert run(tmp_path, write(tmp_path, SAY), MLAUNCH_WARM="20m").stdout == "0 1\n"
        assert [(state.served, state.idle) for state in kept()] == [(1, 1200.0)]
    finally:
        zygote_upkeep.end_all(os.environ)
    done = run(tmp_path, write(tmp_path, SAY), MLAUNCH_WARM="soon")
    assert done.returncode == 2
    assert "mlaunch run: MLAUNCH_WARM=soon: allowed: a time with its unit, such as 90s, 30m, 8h or 2d" in done.stderr


def test_preloaded_modules(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What leaves nothing behind; a second start with more is refused."""
    (tmp_path / "threads.py").write_text("import threading; threading.Thread(target=threading.Event().wait).start()")
    (tmp_path / "opens.py").write_text("import os; fd = os.open('/etc/hostname', os.O_RDONLY)")
    for name, why in (
        ("threads", "cannot preload threads: its import starts a thread"),
        ("opens", "cannot preload opens: its import opens /etc/hostname"),
        ("nosuch", "--preload nosuch: there is no module of this name"),
    ):
        done = warm("--preload", name, PYTHONPATH=f"{ROOT}:{tmp_path}")
        assert (done.returncode, why in done.stderr) == (1, True), done
    assert kept() == []
    try:
        assert "has imported torch, fileinput, cmd is kept until 30 min" in warm("--preload", "fileinput,cmd").stdout
        assert warm("--preload", "cmd").returncode == 0
        done = warm("--preload", "cmd,code")
        assert "is kept here already, and has not imported code; end it with mlaunch warm --stop" in done.stderr
        script = write(tmp_path, "import sys; print(sorted({'cmd', 'mailbox'} & {*sys.modules}))")
        assert run(tmp_path, "--preload", "cmd,mailbox", script).stdout == "['cmd', 'mailbox']\n"
        assert [state.served for state in kept()] == [1]
        assert main(["warm", "--status"]) == 0
        assert "with torch, fileinput, cmd" in capfd.readouterr().out
        assert main(["ps"]) == 0
        assert "a fork server (pid" in capfd.readouterr().out
        assert main(["warm", "--stop"]) == 0
    finally:
        zygote_upkeep.end_all(os.environ)
    assert main(["warm", "--stop"]) == 0
    assert capfd.readouterr().out.endswith("no fork server is kept here\n")
