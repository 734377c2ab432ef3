"""A fork server that outlives its caller: ``mlaunch warm``, and who gets forks of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlaunch.base import linux
from mlaunch.base.peer_process import confinement, is_filtered
from mlaunch.warm.caller import zygotes
from mlaunch.warm.wire import import_facts
from mlaunch.warm.wire.zygote_messages import ZygoteState
from tests import builds, launches, schema, warm_differences
from tests.conftest import ROOT
from tests.imported import IMPORTED
from tests.processes import alive, wait_gone, wait_until
from tests.system.commands import FRESH, environment, run, start, write

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
# What a caller may have otherwise, and a fork takes over.
CHANGED = """
umask 027; ulimit -S -n 512; ulimit -S -c 0; trap '' USR1 HUP; export TZ=Asia/Tokyo LOGLEVEL=DEBUG
exec "$0" "$@"
"""


# Tells of each variable that C code asks for.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>
extern char **environ;
static void tell(const char *name) {
    for (char **one = environ; one && *one; one++)
        if (!strncmp(*one, "ASKED_FILE=", 11)) {
            int fd = open(*one + 11, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
            if (write(fd, name, strlen(name)) < 0 || write(fd, "\n", 1) < 0) _exit(1);
            close(fd);
        }
}
char *getenv(const char *name) {
    tell(name);
    return ((char *(*)(const char *))dlsym(RTLD_NEXT, "getenv"))(name);
}
char *secure_getenv(const char *name) {
    tell(name);
    return ((char *(*)(const char *))dlsym(RTLD_NEXT, "secure_getenv"))(name);
}
"""
NOT_COUNTED = {
    "__PYVENV_LAUNCHER__",  # of other systems
    "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE",  # by a process that only tries a store out
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container with a filter, as Docker's are, a kept server serves nobody unless that is said."""
    if is_filtered(confinement()):
        monkeypatch.setenv(import_facts.SANDBOX, "1")


def warm(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return run(ROOT, *words, command=WARM, **changes)


def kept() -> list[ZygoteState]:
    return launches.kept_servers()


@pytest.fixture
def zygote() -> Iterator[ZygoteState]:
    """One that is kept, and none afterwards."""
    done = warm("--for", "20m")
    assert done.returncode == 0, done.stderr
    (state,) = kept()
    assert re.search(rf"a warm fork server \(pid {state.pid}\) has imported torch, and stays until 20 min", done.stdout)
    with contextlib.suppress(ProcessLookupError):
        yield state
    launches.end_kept_servers()
    assert not alive(state.pid)


@pytest.mark.dear("all kinds of callers, beside one kept server")
def test_a_command_a_script_ranks_that_stay_and_tests_get_forks(zygote: ZygoteState, tmp_path: Path) -> None:
    done = run(tmp_path, "--nproc-per-node", "2", write(tmp_path, SAY), MLAUNCH_DEBUG="1")
    assert sorted(done.stdout.splitlines()) == ["0 2", "1 2"]
    assert re.search(rf"the fork server is a fork \(pid \d+\) of the warm one \(pid {zygote.pid}\)", done.stderr)
    path = write(tmp_path, DECORATED, "decorated.py")
    done = run(tmp_path, path, command=[IMPORTED])
    assert (done.stdout, builds.without_gloo(done.stderr)) == ("1\n2\n", "")
    path = write(tmp_path, TESTED, "test_on_ranks.py")
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # those of others take longer to import than all else here
    command = ["-m", "pytest", "-p", "mlaunch.pytest.plugin", "-q", "-p", "no:cacheprovider", path]
    done = run(tmp_path, *command, command=[IMPORTED], **alone)
    assert "1 passed" in done.stdout
    wait_until(lambda: kept()[0].serving == 0)
    assert [(state.pid, state.served) for state in kept()] == [(zygote.pid, 3)]


@pytest.fixture
def fresh_zygote() -> Iterator[None]:
    """One that is no fork of these tests, and has imported nothing of theirs."""
    done = run(ROOT, "--for", "20m", command=[sys.executable, *WARM[1:]])
    assert done.returncode == 0, done.stderr
    yield
    launches.end_kept_servers()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_zygote")
def test_a_rank_is_as_without(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    script = str(tmp_path / write(tmp_path, warm_differences.PROBE))
    found = {}
    for name, warm_or_not in (("without", "0"), ("with", "")):
        changes = {"MLAUNCH_WARM": warm_or_not, "OUT": str(tmp_path / name)}
        command = ["sh", "-c", CHANGED, *FRESH]
        done = run(folder, "--nproc-per-node", "2", script, "--lr", "1", command=command, **changes)
        assert done.returncode == 0, done.stderr
        found[name] = [json.loads((tmp_path / f"{name}-{rank}").read_text()) for rank in range(2)]
    for with_it, without in zip(found["with"], found["without"], strict=True):
        assert warm_differences.differences(with_it, without) == {}
        assert len(without) >= 150
        assert (with_it["status Umask"], with_it["variable TZ"]) == ("0027", "Asia/Tokyo")
    assert kept()[0].served == 1


@pytest.mark.parametrize("change", warm_differences.CHANGES)
def test_what_a_fork_cannot_take_over_is_a_fact(change: str) -> None:
    """Whoever has it otherwise starts a fresh interpreter, and is told by which word."""
    fact, make = warm_differences.CHANGES[change]
    before = zygotes.facts_of(os.environ)
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            make()
            after = zygotes.facts_of(os.environ)
            os.write(theirs, json.dumps(sorted(name for name in after if after[name] != before[name])).encode())
        os._exit(0)
    os.close(theirs)
    os.waitpid(pid, 0)
    with os.fdopen(ours) as told:
        said = told.read()
    if not said or said == "[]":
        pytest.skip("this system refuses it, or does not tell of it")
    assert fact in json.loads(said)


@pytest.mark.slow
def test_all_variables_that_are_read_at_an_import_count(tmp_path: Path) -> None:
    """By C code, which asks the C library: it is asked in its place. What Python code reads, a kept server notes."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    write(tmp_path, SHIM, "shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "shim.so", "shim.c", "-ldl"], cwd=tmp_path, check=True)
    code = "from mlaunch.forkserver import imports; imports.load(('mlaunch.caller.launcher', 'mlaunch.run.rank'))"
    changes = {"LD_PRELOAD": str(tmp_path / "shim.so"), "ASKED_FILE": str(tmp_path / "asked")}
    done = run(tmp_path, "-c", code, command=[sys.executable], **changes)
    assert done.returncode == 0, done.stderr
    asked = {*(tmp_path / "asked").read_text().split()} - NOT_COUNTED
    assert "OMP_NUM_THREADS" in asked
    assert asked - import_facts.environ_to_keep(dict.fromkeys(asked, "x")).keys() == set()


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
    assert list(launches.runtime_directory().glob("*.warm")) == []


def test_a_kept_server_ends_when_its_socket_is_removed(zygote: ZygoteState) -> None:
    (path,) = launches.runtime_directory().glob("*.warm")
    path.unlink()
    wait_gone([zygote.pid])


def test_a_kept_server_ends_by_itself_after_some_time() -> None:
    done = warm("--for", "0.2s")
    (pid,) = map(int, re.findall(r"\(pid (\d+)\)", done.stdout))
    wait_gone([pid])
    assert kept() == []


@pytest.mark.dear("kept servers are fresh interpreters")
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
        done = run(tmp_path, script, **changes | {"MLAUNCH_DEBUG": "0"})
        assert done.stdout == "two\n"
        told = (
            f"mlaunch: the warm fork server (pid {state.pid}) ends: {library} has changed since it was imported; start"
        )
        assert told in done.stderr  # once: the next finds none
        wait_gone([state.pid])
    finally:
        launches.end_kept_servers()


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
        launches.end_kept_servers()


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


@pytest.mark.dear("a kept server is a fresh interpreter")
def test_variables_of_the_shell_that_keeps_one(tmp_path: Path) -> None:
    """Modules may read them while they are imported, for who has the same; no other has them, and the token nobody."""
    write(tmp_path, "import os; found = [os.environ.get(n) for n in ('HF_HOME', 'MLAUNCH_TOKEN')]", "lib/reads.py")
    look = "import os, reads; print(reads.found, os.environ.get('HF_HOME'), open('/proc/self/environ').read())"
    path = f"{ROOT}:{tmp_path}/lib"
    try:
        shell = {"HF_HOME": "/of/the/shell", "AWS_SECRET": "secret", "MLAUNCH_TOKEN": "token"}
        command = [sys.executable, "-m", "mlaunch", "warm"]  # whose environment is what it was given
        begun = run(ROOT, "--preload", "reads", command=command, PYTHONPATH=path, **shell)
        assert begun.returncode == 0, begun.stderr
        script = write(tmp_path, look)
        done = run(tmp_path, script, PYTHONPATH=path, MLAUNCH_DEBUG="1")
        assert done.stdout.startswith("[None, None] None "), done.stderr
        assert "variable HF_HOME was set to something else when a module of the warm fork server read it" in done.stderr
        assert "HF_HOME was set" in warm("--status", PYTHONPATH=path).stdout
        done = run(tmp_path, script, PYTHONPATH=path, MLAUNCH_DEBUG="1", HF_HOME="/of/the/shell")
        assert done.stdout.startswith("['/of/the/shell', None] /of/the/shell "), done.stderr
        (state,) = kept()
        assert state.served == 1
        for text in (done.stdout, Path(f"/proc/{state.pid}/environ").read_text()):
            assert f"PYTHONPATH={path}" in text
            assert not re.search("AWS_SECRET|MLAUNCH_TOKEN=|HF_HOME=", text)
    finally:
        launches.end_kept_servers()


@pytest.mark.dear("a kept server is a fresh interpreter")
def test_a_server_is_left_where_that_is_wanted(tmp_path: Path) -> None:
    try:
        assert run(tmp_path, write(tmp_path, SAY), MLAUNCH_WARM="20m").stdout == "0 1\n"
        wait_until(lambda: bool(kept()))
        assert run(tmp_path, write(tmp_path, SAY), MLAUNCH_WARM="20m").stdout == "0 1\n"
        assert [(state.served, state.idle) for state in kept()] == [(1, 1200.0)]
    finally:
        launches.end_kept_servers()
    done = run(tmp_path, write(tmp_path, SAY), MLAUNCH_WARM="soon")
    assert done.returncode == 2
    assert "mlaunch run: MLAUNCH_WARM=soon: allowed: a time with its unit, such as 90s, 30m, 8h or 2d" in done.stderr


@pytest.mark.dear("a kept server is a fresh interpreter")
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
        assert "has imported torch, fileinput, cmd, and stays until 30 min" in warm("--preload", "fileinput,cmd").stdout
        assert warm("--preload", "cmd").returncode == 0
        done = warm("--preload", "cmd,code")
        assert "runs here already, and has not imported code; end it with mlaunch warm --stop" in done.stderr
        script = write(tmp_path, "import sys; print(sorted({'cmd', 'mailbox'} & {*sys.modules}))")
        assert run(tmp_path, "--preload", "cmd,mailbox", script).stdout == "['cmd', 'mailbox']\n"
        assert [state.served for state in kept()] == [1]
        assert launches.command("warm", "--status") == 0
        assert "with torch, fileinput, cmd" in capfd.readouterr().out
        assert launches.command("warm", "--status", "--json") == 0
        (kept_server,) = json.loads(capfd.readouterr().out)
        schema.check(kept_server, "kept")
        assert kept_server["preload"] == ["fileinput", "cmd"]
        assert launches.command("ps") == 0
        assert "a warm fork server (pid" in capfd.readouterr().out
        assert launches.command("warm", "--stop") == 0
    finally:
        launches.end_kept_servers()
    assert launches.command("warm", "--stop") == 0
    assert capfd.readouterr().out.endswith("no warm fork server runs here\n")
