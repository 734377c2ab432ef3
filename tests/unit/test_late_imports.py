"""What the fork server imports after ranks had to."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import mlaunch
from mlaunch import launcher
from mlaunch.base import linux
from mlaunch.base.fds import OwnedFds
from mlaunch.forkserver import imports
from mlaunch.forkserver.imports import LateImports
from mlaunch.protocol import late_imports

MODULES = {
    "harmless": "with open(__file__): pass",
    "opens_a_file": "opened = open(__file__)",
    "starts_a_thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "raises": "raise ImportError('it lacks something')",
    "exits": "raise SystemExit(0)",
}


@pytest.fixture(autouse=True)
def nothing_noted() -> Iterator[None]:
    """Launches of earlier tests may have noted something in the memory that this process shares with their ranks."""
    late_imports._noted[:] = bytes(len(late_imports._noted))
    late_imports._standard[:] = bytes(len(late_imports._standard))
    yield
    if late_imports._own.told >= 0:
        os.close(late_imports._own.told)
    late_imports._own.told = -1


@pytest.fixture(params=MODULES)
def noted(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that a fork of this process has imported."""
    name: str = request.param
    (tmp_path / f"{name}.py").write_text(MODULES[name])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("MLAUNCH_PREPARE", raising=False)
    monkeypatch.setattr(late_imports, "NAMES", (name,))
    pid = os.fork()
    if pid == 0:
        sys.modules[name] = sys
        late_imports.note(leads=False)
        os._exit(0)
    os.waitpid(pid, 0)
    yield name
    late_imports._noted[0] = 0
    sys.modules.pop(name, None)
    gc.unfreeze()


def test_a_module_that_leaves_something_behind_is_not_imported(noted: str, capfd: pytest.CaptureFixture[str]) -> None:
    late, (reader, writer) = LateImports(), os.pipe()
    assert late.wanted()
    trial = late.begin(OwnedFds(writer))
    os.close(writer)
    assert trial is not None
    assert not late.wanted()  # a second trial beside the first
    _, status = os.waitpid(trial.pid, 0)
    assert os.read(reader, 1) == b""  # the fork did not keep it
    late.end(status)
    assert (noted in sys.modules) == (noted == "harmless")
    assert not late.wanted()
    assert capfd.readouterr() == ("", "")
    os.close(trial.pidfd)
    os.close(reader)


def test_a_system_that_has_no_process_left(noted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", refuse)
    late = LateImports()
    assert late.begin(OwnedFds()) is None
    assert not late.wanted()
    assert noted not in sys.modules


@pytest.mark.parametrize("noted", ["raises", "exits"], indirect=True)
def test_an_import_fails_after_a_trial_that_did_not(noted: str) -> None:
    late = LateImports()
    trial = late.begin(OwnedFds())
    assert trial is not None
    os.waitpid(trial.pid, 0)
    late.end(0)
    os.close(trial.pidfd)
    assert not late.wanted()
    assert noted not in sys.modules


@pytest.mark.usefixtures("noted")
@pytest.mark.parametrize("noted", ["harmless"], indirect=True)
def test_launches_wait_for_a_while_for_what_their_ranks_would_import(monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateImports()
    assert late.wanted_now()
    assert late.holds() == 0.0
    trial = late.begin(OwnedFds())
    assert trial is not None
    assert late.holds() > 0.0
    monkeypatch.setattr(imports, "_LONGEST_HOLD", 0.0)  # a trial that hangs
    assert late.holds() == 0.0
    os.waitpid(trial.pid, 0)
    late.end(1)
    os.close(trial.pidfd)
    assert not late.wanted_now()


def test_who_listens_hears_of_an_import_though_descriptors_were_closed() -> None:
    """In a rank that has closed them, and opened files since, nothing is written."""
    heard = late_imports.listen()
    pid = os.fork()
    if pid == 0:
        late_imports.tell()
        os._exit(0)
    os.waitpid(pid, 0)
    assert linux.wait_readable([heard], 60.0)
    late_imports.hear()
    assert not linux.wait_readable([heard], 0.0)
    os.close(heard)
    late_imports.tell()
    memory = os.memfd_create("a user's")
    try:
        os.dup2(memory, heard)
        late_imports.tell()
        assert os.fstat(memory).st_size == 0
    finally:
        for fd in {heard, memory}:
            os.close(fd)
        late_imports._own.told = -1


def test_ours_are_where_public_names_live() -> None:
    assert {*late_imports._OURS} <= {"mlaunch.comm", *mlaunch._HOMES.values()}
    assert "mlaunch.display.rank" in late_imports._PARTS  # a notebook's ranks have a part in each call
    assert all(map(importlib.util.find_spec, late_imports._PARTS))


def test_late_imports_can_be_turned_off(noted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert late_imports.missing() == [noted]
    monkeypatch.setenv("MLAUNCH_PREPARE", "0")
    assert not LateImports().wanted()


@pytest.fixture
def standard(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of Python's own that this process has not imported, and a fork of it has; others that do not count."""
    name = "colorsys"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delenv("MLAUNCH_PREPARE")
    pid = os.fork()
    if pid == 0:
        late_imports.begin()
        for own in ("antigravity", "my_module"):
            sys.modules[own] = sys
        sys.modules["wave"] = ModuleType("wave")  # a file of the user's
        __import__(name)
        late_imports.note(leads=True)
        os._exit(0)
    os.waitpid(pid, 0)
    yield name
    late_imports._standard[:] = bytes(len(late_imports._standard))
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.parametrize("noted", ["raises"], indirect=True)
def test_a_module_of_pythons_own_is_imported_though_another_fails(
    standard: str, noted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLAUNCH_PREPARE", raising=False)
    assert late_imports.missing_standard() == [standard]
    late = LateImports()
    for tried in ([noted], [standard]):
        assert late._missing() == tried
        trial = late.begin(OwnedFds())
        assert trial is not None
        _, status = os.waitpid(trial.pid, 0)
        os.close(trial.pidfd)
        late.end(status)
    assert standard in sys.modules
    assert not late.wanted()


def test_a_file_that_is_found_under_a_standard_name_is_not_imported(
    standard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{standard}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    late_imports.import_module(standard)
    assert standard not in sys.modules


def test_no_rank_takes_torchs_operators_apart_as_it_ends() -> None:
    pytest.importorskip("torch")

    def run_at_its_end() -> list[bool]:
        from torch.library import Library, _del_library

        own = Library("mlaunch_of_the_script", "DEF")
        ends = [ref for ref in weakref.finalize._registry if (ref.peek() or (None,) * 2)[1] is _del_library]  # type: ignore[attr-defined]
        return [end.atexit for end in ends if own is not None]

    (ends,) = launcher(run_at_its_end, 1)()
    assert ends.count(True) == 1  # that of the script's own
    assert len(ends) > 1
