"""Files that others may get in the way of: links, FIFOs, directories of other users."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlaunch.base import own_files
from mlaunch.caller.options.launch_options import Options
from mlaunch.core.load import as_keyword
from mlaunch.leases.caller import lease_directory
from mlaunch.profile.caller import CallTrace
from mlaunch.profile.rank import StepProfile
from mlaunch.profile.wire import ProfileOrder, TracePart
from mlaunch.protocol import launch_files, registry
from mlaunch.protocol.launch_files import LogFile, new_directory
from mlaunch.sweeps.caller.trial_file import TrialFile, TrialKey
from mlaunch.warm.wire import zygote_place
from tests.another_user import said_by_another_user


def anothers_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of another user's, with a file in it."""
    folder.chmod(0o777)
    monkeypatch.chdir(folder)

    def make() -> str:
        os.mkdir("another")
        with open("another/file", "w", encoding="utf-8"):
            return "made"

    assert said_by_another_user(make) == "made"
    return folder / "another"


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    for name in ("fifo", "link", "."):
        with pytest.raises(OSError, match=r"not a regular file|symbolic links"):
            own_files.open_file(str(tmp_path / name), os.O_RDONLY)
    os.close(own_files.open_file(str(tmp_path / "file"), os.O_RDONLY))


def test_a_directory_is_this_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, link = tmp_path / "ours", tmp_path / "link"
    ours.mkdir()
    link.symlink_to(ours)
    with own_files.this_users_directory(ours) as fd:
        assert os.fstat(fd).st_ino == ours.stat().st_ino
    theirs = anothers_directory(tmp_path, monkeypatch)
    for path in (link, theirs):
        with pytest.raises(OSError, match=r"another user|Not a directory"), own_files.this_users_directory(path):
            pass
        own_files.remove_directory(path)
    assert [*theirs.iterdir()] == [theirs / "file"]
    own_files.remove_directory(ours)
    assert not ours.exists()


def test_a_server_of_files_may_give_what_root_makes_to_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So whose a new file there is counts."""
    theirs = anothers_directory(tmp_path, monkeypatch)
    monkeypatch.setattr(own_files, "_owner_of_new_file", lambda _: theirs.stat().st_uid)
    with own_files.this_users_directory(theirs):
        pass


@pytest.mark.parametrize("use", [registry.opened, lease_directory.opened])
def test_launches_and_leases_are_in_no_directory_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], AbstractContextManager[object]]
) -> None:
    """Nor by a link, though its mode is right."""
    theirs, ours, link = anothers_directory(tmp_path, monkeypatch), tmp_path / "ours", tmp_path / "link"
    ours.mkdir()
    for path in (theirs, ours):
        path.chmod(0o700)
    link.symlink_to(ours)
    with use(ours):
        pass
    with pytest.raises(PermissionError, match="it belongs to uid 65534 with mode 0700"), use(theirs):
        pass
    with pytest.raises(OSError, match=r"Not a directory|symbolic link"), use(link):
        pass
    assert [path.name for path in theirs.iterdir()] == ["file"]


@pytest.mark.timeout(60)  # it would wait for ever
@pytest.mark.parametrize("name", ["lock", "ticket.1", "ticket.1.json"])
def test_a_lease_is_written_through_no_link(tmp_path: Path, name: str) -> None:
    """That a sandbox of this user's has left, which shares the directory, and cannot write to what it leads to."""
    aim, leases = tmp_path / "aim", tmp_path / "leases"
    aim.write_text("kept")
    leases.mkdir(mode=0o700)
    (leases / name).symlink_to(aim)
    with (
        pytest.raises(OSError, match=r"symbolic link|is in the way of"),
        lease_directory.opened(leases) as opened,
        opened,
    ):
        opened.take("ticket.1", {"who": "f()"})
    (leases / name).unlink()
    os.mkfifo(leases / "ticket.2.json")
    with lease_directory.opened(leases) as opened, opened:
        assert opened.said("ticket.2") == {}
    assert aim.read_text() == "kept"


def test_a_directory_in_tmp_that_somebody_else_made_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases and launches are in the login's own then. Nothing is listed, opened or removed by way of the other's."""
    uid = os.getuid()
    temporary, runtime = tmp_path / "tmp", tmp_path / "run"
    (runtime / str(uid) / "mlaunch").mkdir(parents=True, mode=0o700)
    temporary.mkdir()
    monkeypatch.setattr(lease_directory, "_TMP", str(temporary))
    monkeypatch.setattr(lease_directory, "_RUNTIME", str(runtime))
    assert lease_directory.place({}) == temporary / f"mlaunch-{uid}-leases"
    anothers_directory(temporary, monkeypatch).rename(temporary / f"mlaunch-{uid}-leases")
    assert lease_directory.place({}) == runtime / f"{uid}/mlaunch-leases"
    assert lease_directory.place({lease_directory.VARIABLE: "/x"}) == Path("/x")
    theirs, ours = temporary / f"mlaunch-{uid}", runtime / f"{uid}/mlaunch"
    monkeypatch.setattr(registry, "candidates", lambda _: [ours, theirs])
    assert registry.home({}) == ours
    theirs.symlink_to(ours)  # as somebody else leaves it
    with zygote_place.listen(ours, "key")[0]:
        assert list(zygote_place.names({})) == [(ours, "key")]
        zygote_place.remove(theirs, "key", (ours / "key.warm").lstat().st_ino)
        assert (ours / "key.warm").exists()
        (runtime / str(uid)).rename(runtime / "ended")
        assert registry.home({}) == theirs
        assert list(zygote_place.names({})) == []


def test_another_users_directory_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have any number of names."""
    theirs = anothers_directory(tmp_path, monkeypatch)
    (theirs / "key.warm").touch()
    (theirs / "launch.sock").touch()
    monkeypatch.setattr(registry, "candidates", lambda _: [theirs])
    monkeypatch.setattr(os, "listdir", lambda _: pytest.fail("listed"))
    assert list(zygote_place.names({})) == []
    with pytest.raises(PermissionError, match="must belong to this user"):
        list(registry.connections({"XDG_RUNTIME_DIR": "/x"}))


@pytest.mark.parametrize("where", ["log", "log/attempt_0", "log/attempt_0/3", "log/attempt_0/3/stdout.log"])
def test_a_link_in_the_way_of_a_log_is_not_followed(tmp_path: Path, where: str) -> None:
    """Where somebody else may rename in ``log_dir=``."""
    aim, said = tmp_path / "home", list[str]()
    aim.mkdir()
    (tmp_path / "log/attempt_0/3").mkdir(parents=True)
    path = tmp_path / where
    if path.exists():
        path.rename(tmp_path / "aside")
    path.symlink_to(aim if path.suffix == "" else aim / ".bash_profile")
    log = LogFile(str(tmp_path / "log"), 0, 3, 1, said.append)
    log.write(b"text")
    log.close()
    assert len(said) == 1
    assert "stdout.log cannot be written (" in said[0]
    assert [*aim.iterdir()] == []


def test_a_log_is_not_written_into_another_users_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, said = anothers_directory(tmp_path, monkeypatch), list[str]()
    LogFile(str(theirs), 0, 3, 1, said.append).write(b"text")
    assert "stdout.log cannot be written (it belongs to another user (uid 65534))" in said[0]
    assert [*theirs.iterdir()] == [theirs / "file"]
    log = LogFile(new_directory(tmp_path, "f()"), 0, 3, 1, said.append)
    log.write(b"text")
    log.close()
    assert (Path(log.path).read_text(), len(said)) == ("text", 1)


def test_a_file_of_a_sweep_is_the_one_that_was_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if somebody else puts another in its place meanwhile."""
    path, file = tmp_path / "sweep", TrialFile(tmp_path / "sweep", "train()", len)
    file.look_up([])
    file.add(TrialKey("1"), [5], None)
    file.close()
    looked_at = file._lock

    def swapped() -> None:
        looked_at()
        path.rename(tmp_path / "ours")
        path.write_bytes((tmp_path / "ours").read_bytes().replace(b"[5]", b"[6]"))

    monkeypatch.setattr(file, "_lock", swapped)
    assert file.look_up([TrialKey("1")]) == [([5], None)]
    file.close()


def test_a_link_is_no_file_of_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "sweep").symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match="cannot be opened for writing: it is a link; nothing was run"):
        TrialFile(tmp_path / "sweep", "train()", len).look_up([])
    assert not (tmp_path / "made").exists()


@pytest.mark.timeout(60)  # it would wait for ever
def test_an_error_file_is_a_file(tmp_path: Path) -> None:
    """A rank may have put anything there."""
    crash, path = os.memfd_create("crash"), tmp_path / "error.json"
    os.mkfifo(path)
    launch_files.copy_error_file(str(path), crash)
    with pytest.raises(OSError, match="No such device or address"):
        launch_files.write_error(str(path), launch_files.new_error("m", "t"), 1)
    path.unlink()
    path.symlink_to("/etc/passwd")
    launch_files.copy_error_file(str(path), crash)
    assert os.fstat(crash).st_size == 0
    path.unlink()
    launch_files.write_error(str(path), launch_files.new_error("m", "t"), 1)
    launch_files.copy_error_file(str(path), crash)
    assert os.fstat(crash).st_size > 0
    os.close(crash)


def test_a_trace_is_not_written_through_a_link(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither by ranks, nor of what other machines send, nor as a whole, where somebody may rename beside it."""
    aim, recorded = tmp_path / "home", SimpleNamespace(export_chrome_trace=lambda path: Path(path).touch())
    aim.mkdir()
    trace: Any = CallTrace(Options(profile=tmp_path / "trace.json"), as_keyword)
    order: ProfileOrder = trace.section
    profile: Any = StepProfile(order, 0)
    profile._write(recorded)
    assert order.written_by(0)
    os.rename(order.directory, tmp_path / "aside")
    os.symlink(aim, order.directory)
    profile._try(lambda: profile._write(recorded))
    assert "mlaunch: rank 0 is not profiled: NotADirectoryError" in capfd.readouterr().err
    trace.heard(TracePart(1, b"part"))
    report: Any = SimpleNamespace(ranks=[SimpleNamespace(rank=0)])
    with pytest.raises(NotADirectoryError):
        trace._write(report, {0: order.part_of(0)}, print)
    trace.close()
    assert [*aim.iterdir()] == []
