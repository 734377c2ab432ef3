"""Parts of a fork server that outlives its caller: times, what counts at an import, the files that it has imported."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import os
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, cast

import pytest

from mlaunch.base import linux
from mlaunch.base.peer_process import is_this_user, peer_process
from mlaunch.caller import warm_server
from mlaunch.caller.fork_server import Interpreter
from mlaunch.cli import main
from mlaunch.protocol import payload
from mlaunch.protocol.channel import Channel
from mlaunch.rank import process
from mlaunch.warm import caller
from mlaunch.warm.caller import zygotes
from mlaunch.warm.server import Zygote, _Visitor
from mlaunch.warm.server.import_record import ImportRecord, LoadedFiles
from mlaunch.warm.wire import import_facts, zygote_place
from mlaunch.warm.wire.zygote_messages import ForkEnded
from tests.processes import wait_until
from tests.sandboxes import nothing, said_in_sandbox


def test_durations() -> None:
    assert [caller.duration("--for", text) for text in ("90s", "30m", "1.5h", "2d")] == [90, 1800, 5400, 172800]
    for text in ("", "30", "m", "-3m", "0s", "3 weeks", "999999d", "1e3s"):
        with pytest.raises(ValueError, match=r"--for .*: allowed: a time with its unit, such as 90s, 30m, 8h or 2d"):
            caller.duration("--for", text)


def test_facts_that_count_at_an_import() -> None:
    here = import_facts.of_this_process({"OMP_PROC_BIND": "1", "OMP_NUM_THREADS": "3", "HOME": "/x", "LC_ALL": "C"})
    assert {name for name in here if name.startswith("variable")} == {
        "variable OMP_PROC_BIND", "variable OMP_NUM_THREADS", "variable LC_ALL"
    }  # fmt: skip
    assert all(here[name] for name in ("cgroup", "namespace mnt", "status Uid"))
    assert {"session keyring", "login", "login session", "root directory", "security label"} <= here.keys()
    other = here | {"variable OMP_PROC_BIND": "0", "cgroup": f"{here['cgroup']}/job"}
    del other["variable LC_ALL"]
    assert import_facts.key_of(here) == import_facts.key_of(dict(reversed(list(here.items()))))
    assert import_facts.key_of(other) != import_facts.key_of(here)
    assert import_facts.differences(here, here) == []
    told = import_facts.differences(here, import_facts.told(other))
    assert told[1:] == ["variable LC_ALL: here 'C', there not set", "variable OMP_PROC_BIND: here '1', there '0'"]


def test_long_values_that_differ_late_are_told() -> None:
    path = "/lib:" * 20
    far = {"path": path + "/a", "flags": path * 20 + "/a"}
    near = {"path": path + "/b", "flags": path * 20 + "/b"}
    assert import_facts.differences(far, import_facts.told(far)) == []
    assert max(map(len, import_facts.told(far).values())) < 500
    assert import_facts.differences(far, import_facts.told(near)) == [
        "flags: equal in the first 400 characters, and not behind them",
        f"path: here '...{'lib:/' * 6}a', there '...{'lib:/' * 6}b'",
    ]


def test_a_server_has_nothing_of_the_options_of_the_call_that_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """But what libraries read as they are loaded: with other such variables there is another server."""
    asked: list[dict[str, str]] = []

    def start(environ: dict[str, str], _: object) -> object:
        asked.append(environ)
        return types.SimpleNamespace(alive=lambda: True)

    monkeypatch.setattr(warm_server.load, "server_at_hand", start)
    monkeypatch.setattr(os, "environ", {"HOME": "/x", "OMP_PROC_BIND": "1"})
    server = warm_server.WarmServer()
    first = server.get({"HOME": "/y", "OWN": "1", "LC_ALL": "C", "OMP_DYNAMIC": "1"})
    assert asked == [{"HOME": "/x", "OMP_DYNAMIC": "1"}]
    assert server.get({"OMP_DYNAMIC": "1"}) is first


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "JOB_ID"])
def test_what_is_kept_belongs_to_one_job(name: str) -> None:
    """Where a scheduler has no cgroups, only its number for the job says whose ranks are whose children."""
    keys = {import_facts.key_of(import_facts.of_this_process({name: job})) for job in ("1", "2")}
    assert len(keys | {import_facts.key_of(import_facts.of_this_process({}))}) == 3


def test_the_session_keyring_is_a_fact() -> None:
    def joined() -> str:
        keyctl, join = 250, 1
        if os.uname().machine != "x86_64" or ctypes.CDLL(None).syscall(keyctl, join, None) < 0:
            return ""
        return linux.session_keyring()

    here, there = linux.session_keyring(), said_in_sandbox(nothing, joined)
    if not (here and there):
        pytest.skip("needs keyrings")
    assert here != there


def test_what_is_kept_has_no_secret_of_its_shell() -> None:
    environ = {"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "x", "MLAUNCH_TOKEN": "x", "OMP_DYNAMIC": "1", "LANG": "C"}
    assert import_facts.environ_to_keep(environ) == {"PATH": "/bin", "OMP_DYNAMIC": "1", "LANG": "C"}


def test_paths() -> None:
    base = ["/lib/a", "/lib/b"]
    assert import_facts.foreign_entries(["/me", *base], base) == (["/me"], [])
    assert import_facts.foreign_entries(["/lib/a"], base) == ([], ["/lib/b"])
    assert import_facts.foreign_entries(["/lib/a", "/lib/b", "/lib/a"], base) == ([], [])
    assert import_facts.foreign_entries(["/lib/b", "/lib/a"], base) == ([], base)


def test_files_that_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    path = tmp_path / "lib" / "warm_part.py"
    path.write_text("")
    module = types.ModuleType("warm_part")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "warm_part", module)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "lib")])
    files = LoadedFiles()
    assert files.changed() == ""
    assert files.why_others([str(tmp_path), str(tmp_path / "lib")]) == ""
    assert files.why_others([str(tmp_path)]) == f"its sys.path lacks {tmp_path / 'lib'}, or has it in another order"
    (tmp_path / "warm_part").mkdir()  # a namespace package comes last
    assert files.why_others([str(tmp_path), str(tmp_path / "lib")]) == ""
    (tmp_path / "warm_part" / "__init__.py").touch()
    assert "would be imported in place of" in files.why_others([str(tmp_path), str(tmp_path / "lib")])
    path.write_text("new = 1")
    assert files.changed() == f"{path} has changed since it was imported"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on sys.path, as installers fill it."""
    folder = tmp_path / "site-packages"
    (folder / "warm_found").mkdir(parents=True)
    (folder / "warm_found" / "__init__.py").write_text("raise ImportError")
    (folder / "mlaunch_x-1.dist-info").mkdir()
    (folder / "mlaunch_x-1.dist-info" / "entry_points.txt").write_text("[console_scripts]\nmlaunch = x:main\n")
    (folder / "old.pth").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    return folder


_INSTALLED: dict[str, tuple[str, str]] = {
    "what was looked for in vain": ("warm_missed/__init__.py", "warm_missed is not what it was"),
    "a part of a package": ("warm_found/part.py", "part is not what it was"),
    "what could not be imported": ("warm_found/__init__.py", ""),  # of itself nothing: an installer changes the place
    "a finder of an editable install": ("__editable__.x.pth", "x.pth, which Python reads as it starts, has changed"),
    "a .pth that is written to": ("old.pth", "old.pth, which Python reads as it starts, has changed"),
    "a plugin of what is loaded": ("y-1.dist-info/entry_points.txt", "y-1.dist-info is not what it was"),
    "what Python looks for as it starts": ("sitecustomize.py", "sitecustomize is not what it was"),
    "a package that nobody asked for": ("warm_other/__init__.py", ""),
    "a program": ("z-1.dist-info/METADATA", ""),
    "another place for a library": ("mlaunch/__init__.py", "mlaunch is not what it was"),
}


@pytest.mark.parametrize("what", _INSTALLED)
def test_what_is_installed_later_counts_where_an_import_would_come_out_otherwise(site: Path, what: str) -> None:
    missed = {"warm_missed": None, "warm_found": None, "warm_found.part": (str(site / "warm_found"),)}
    files = LoadedFiles({**missed, "sitecustomize": None})
    assert files.changed() == ""
    name, told = _INSTALLED[what]
    (site / name).parent.mkdir(exist_ok=True)
    (site / name).write_text("[mlaunch.backends]\nx = y:z\n")
    assert told in files.changed()
    assert bool(files.changed()) is bool(told)


def test_what_is_found_and_cannot_be_imported_counts_when_it_is_installed_anew(site: Path) -> None:
    files = LoadedFiles({"warm_found": None})
    (site / "warm_found").rename(site / "~arm_found")
    (site / "warm_found").mkdir()
    (site / "warm_found" / "__init__.py").write_text("")
    assert f"{site}/warm_found is not what it was" in files.changed()


def test_a_callers_own_places_have_nothing_that_was_missed(tmp_path: Path) -> None:
    files, path = LoadedFiles({"warm_missed": None}), [str(tmp_path), *sys.path]
    (tmp_path / "model.pth").touch()  # not of an interpreter
    assert files.why_others(path) == ""
    (tmp_path / "warm_missed.py").touch()
    assert files.why_others(path) == f"{tmp_path}/warm_missed would be found, which the warm fork server did not find"
    (tmp_path / "dist-packages").mkdir()
    (tmp_path / "dist-packages" / "x.pth").touch()
    assert "x.pth may have changed its interpreter" in files.why_others([f"{tmp_path}/dist-packages", *sys.path])


_READS = """
import os, random, sys, uuid
OWN, FIXED, NUMBER = random.Random(), random.Random(3), uuid.uuid4()
READ = os.environ.get("WARM_READ"), "WARM_ASKED" in os.environ, os.getenv("WARM_NOT_SET")
READ += (os.environb.get(b"WARM_BYTES"),)
COPIED = {**os.environ}, os.environ.copy(), {name for name, _ in os.environ.items() if name.startswith("WARM_")}
for name in os.environ: pass
os.environ.setdefault("WARM_SET", "1")
class Finder:
    def find_spec(*_): return None
sys.meta_path.append(Finder())
try:
    import warm_nowhere.part
except ImportError: pass
from os import urandom
"""


def test_what_imports_read_draw_and_miss_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "warm_reads.py").write_text(_READS)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("READ", "ASKED", "BYTES", "COPIED"):
        monkeypatch.setenv(f"WARM_{name}", "x")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(process, "_set_by_imports", {})
    monkeypatch.setenv("WARM_SET", "0")
    monkeypatch.delenv("WARM_SET")
    record, urandom = ImportRecord(), os.urandom
    with record.reading(), record.drawing(), process.noting_variables():
        reads = importlib.import_module("warm_reads")
    monkeypatch.delitem(sys.modules, "warm_reads")
    assert reads.urandom is os.urandom is urandom
    assert {name: value for name, value in record.read.items() if "WARM" in name} == {
        "WARM_READ": {"x"}, "WARM_ASKED": {"x"}, "WARM_NOT_SET": {None}, "WARM_BYTES": {"x"}, "WARM_SET": {None}
    }  # fmt: skip
    assert record.missed["warm_nowhere"] is None
    assert record.drawn == {"warm_reads": "random.Random"}
    assert record.notes()[0].startswith("warm_reads has drawn random numbers as it was imported (random.Random)")
    assert record.notes()[1].startswith("warm_reads.Finder looks for modules in all commands")
    # As if it were imported by each: what it sets, it sets, but where it has met something else.
    wanted = {"PATH": "/bin", "WARM_READ": "x"}
    assert process._after_imports(wanted) == {**wanted, "WARM_SET": "1"}
    assert process._after_imports({"WARM_SET": "2"}) == {"WARM_SET": "2"}


def test_variables_that_imports_have_read_are_compared_unread() -> None:
    record = ImportRecord({"WARM_READ": {"x"}, "WARM_NOT_SET": {None}, "WARM_TWICE": {None, "x"}})
    there = import_facts.hashed({"WARM_READ": "x", "OTHER": "hush"})
    assert b"hush" not in there
    assert (
        record.why_others(there)
        == "variable WARM_TWICE was set to something else when a module of the warm fork server read it"
    )
    del record.read["WARM_TWICE"]
    assert record.why_others(there) == ""
    there = import_facts.hashed({"WARM_READ": "x", "WARM_NOT_SET": ""})
    assert record.why_others(there) == "variable WARM_NOT_SET was not set when a module of the warm fork server read it"


def test_removals_are_heard(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fd = linux.watch_removals(str(tmp_path))
    assert linux.wait_readable([fd], 0.0) == []
    (tmp_path / "file").unlink()
    assert linux.wait_readable([fd], 30.0) == [fd]
    linux.take_removals(fd)
    assert linux.wait_readable([fd], 0.0) == []
    os.close(fd)
    assert linux.watch_removals(str(tmp_path / "nosuch")) == -1


def test_places(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with zygote_place.locked(tmp_path), pytest.raises(BlockingIOError), zygote_place.locked(tmp_path, 0.01):
        pass
    listener, inode = zygote_place.listen(tmp_path, "key")
    assert zygote_place.is_there(tmp_path, "key", inode)
    connection = zygote_place.connect(tmp_path, "key")
    assert connection is not None
    assert peer_process(connection) == (os.getpid(), os.geteuid())
    assert is_this_user(connection)
    connection.close()
    zygote_place.remove(tmp_path, "key", inode + 1)
    assert zygote_place.is_there(tmp_path, "key", inode)
    with zygote_place.locked(tmp_path):  # whoever starts another sees to the name
        zygote_place.remove(tmp_path, "key", inode)
    listener.close()
    with zygote_place.locked(tmp_path):
        assert zygote_place.connect(tmp_path, "key") is None
        assert zygote_place.is_there(tmp_path, "key", inode)
    assert zygote_place.connect(tmp_path, "key") is None
    assert list(tmp_path.iterdir()) == []
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(tmp_path / "key.warm"))
    tmp_path.chmod(0o755)
    assert zygote_place.connect(tmp_path, "key") is None  # others could have put it there


def test_a_name_is_removed_only_when_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue is that of one that lives; and whoever was refused may meet the next one as he removes."""
    tmp_path.chmod(0o700)
    monkeypatch.setattr(zygote_place, "_BACKLOG", 1)
    listener, inode = zygote_place.listen(tmp_path, "key")
    waiting = []
    while (connection := zygote_place.connect(tmp_path, "key")) is not None:
        waiting.append(connection)
    assert waiting
    assert zygote_place.is_there(tmp_path, "key", inode)
    listener.close()
    listener, inode = zygote_place.listen(tmp_path, "key")
    zygote_place._remove_dead(tmp_path, "key")
    assert zygote_place.is_there(tmp_path, "key", inode)
    for end in (listener, *waiting):
        end.close()


@pytest.mark.parametrize(("works", "told"), [(True, "had not come to this caller"), (False, "was killed")])
def test_one_that_serves_others_first_is_not_ended(works: bool, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    counted = itertools.count()
    monkeypatch.setattr(zygotes, "_PATIENCE", 0.0)
    monkeypatch.setattr(zygotes, "_CHECK", 0.001)
    monkeypatch.setattr(zygotes, "_LONGEST", 0.1 if works else 3600.0)
    monkeypatch.setattr(linux, "worked", lambda _: str(next(counted)) if works else "")
    monkeypatch.setattr(zygotes, "kill", lambda _, pid: killed.append(pid))
    ours: Channel[Any, Any]
    ours, theirs = Channel.pair()
    answer, _ = zygotes._answer(ours, os.getpid())
    assert (told in str(answer), killed) == (True, [] if works else [os.getpid()])
    ours.close()
    theirs.close()


def test_what_a_process_does_shows() -> None:
    before = linux.worked(os.getpid())
    while before and linux.worked(os.getpid()) == before:
        os.sched_yield()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as asleep:
        wait_until(lambda: Path(f"/proc/{asleep.pid}/stat").read_text().split()[2] == "S")
        assert linux.worked(asleep.pid) == linux.worked(asleep.pid)
    assert linux.worked(asleep.pid) == ""


def _watched(name: str) -> str:
    """Return who watches a process whose parent has this name, or traces it if that is ""."""
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        libc = ctypes.CDLL(None)
        if name:
            libc.prctl(15, name.encode(), 0, 0, 0)  # PR_SET_NAME
        else:
            libc.ptrace(0, 0, 0, 0)  # PTRACE_TRACEME
        if name and (child := os.fork()):
            os.waitpid(child, 0)
        else:
            os.write(theirs, zygotes.onlooker().encode())
        os._exit(0)
    os.close(theirs)
    os.waitpid(pid, 0)
    with os.fdopen(ours) as said:
        return said.read().replace(str(pid), "PARENT")


def test_whoever_looks_at_what_a_caller_starts_is_seen(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert _watched("perf_6.1") == "perf_6.1 (pid PARENT)"
    assert _watched("performant") == ""
    assert f"(pid {os.getpid()})" in _watched("")
    monkeypatch.setenv("MLAUNCH_DEBUG", "1")
    monkeypatch.delenv("MLAUNCH_WARM", raising=False)
    monkeypatch.setattr(zygote_place, "names", lambda _: [(tmp_path, "key")])
    monkeypatch.setattr(zygotes, "onlooker", lambda: "perf (pid 7)")
    monkeypatch.setattr(zygotes, "_ask_one_of", None)
    assert caller.server({}, Interpreter()) is None
    assert "no warm fork server is used: perf (pid 7) would not see its forks" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--for", "soon"], "--for soon: allowed: a time with its unit"),
        (["--for", "3m", "--stop"], "--for and --preload go with neither --status nor --stop"),
        (["--status", "--stop"], "not allowed with"),
        (["--stop", "--json"], "--json goes with --status"),
        (["--preload", ""], "--preload : allowed: names of modules with commas between them"),
        (["--preload", "a b"], "--preload a b: allowed: names of modules with commas between them"),
    ],
)
def test_wrong_command_lines(words: list[str], told: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["warm", *words])
    assert (ended.value.code, told in capfd.readouterr().err) == (2, True)


def test_a_directory_that_is_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mlaunch").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["warm"]) == 1
    told = capfd.readouterr().err
    assert told.startswith(
        f"mlaunch: no warm fork server can be started: {tmp_path}/mlaunch: Not a directory; set XDG_RUNTIME"
    )


def test_a_kept_server_stays_for_its_time_after_a_launch_that_took_longer(tmp_path: Path) -> None:
    zygote = Zygote(cast(Any, None), (), 60.0, {}, tmp_path, "key")
    ours, theirs = Channel.pair()
    if (pid := os.fork()) == 0:
        os._exit(0)
    visitor = _Visitor(ours, "", pid, os.pidfd_open(pid))
    zygote.visitors.append(visitor)
    zygote.used -= 3600  # it has been forked an hour ago
    assert zygote._left() == 60.0
    linux.wait_readable([visitor.pidfd], 60.0)
    zygote._reap(visitor)
    assert zygote._left() > 0
    assert theirs.receive()[0] == ForkEnded(0)
    theirs.close()


def test_a_kept_server_is_started_without_the_secret_of_who_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays for hours; its forks get theirs from their callers."""
    asked: dict[str, Any] = {}

    def start(*_args: Any, **options: Any) -> None:
        asked.update(options, passed=payload.read(options["stdin"]))

    monkeypatch.setattr(subprocess, "Popen", start)
    environ = {"MLAUNCH_TOKEN": "hush", "OTHER": "kept"}
    _, word = zygotes._start(environ, 60.0, ("a_module",), tmp_path, 0, awaited=False)
    word.close()
    assert asked["stdout"] == asked["stderr"] == subprocess.DEVNULL  # `| tee` of who leaves it waits for no import
    assert "hush" not in asked["env"].values()
    assert asked["passed"] == {"OTHER": "kept"}  # for what its modules read as they are imported


def test_a_fork_of_a_kept_server_has_no_connection_of_other_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would not hear of an end of the kept server."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    number = theirs.detach()
    visitor = types.SimpleNamespace(fds=lambda: [number])
    kept: Any = types.SimpleNamespace(visitors=[visitor], _listener=socket.socket(), _removals=-1)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit):  # it was given nothing to take over
        Zygote._become_server(kept, cast(Any, None), [])
    assert ours.recv(1) == b""
    ours.close()
