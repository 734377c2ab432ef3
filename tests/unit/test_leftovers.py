"""What counts as left in /dev/shm by a launch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mlaunch.agent import leftovers
from mlaunch.agent.leftovers import SharedNames


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process of this user but this one: others may run what tidies up."""
    monkeypatch.setattr(leftovers, "_own_processes", lambda: iter([str(os.getpid())]))


def dead() -> int:
    """Returns a number that no process has any more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_names_that_libraries_have_drawn_and_nobody_uses(tmp_path: Path) -> None:
    gone = dead()
    names = SharedNames(str(tmp_path))
    assert names.left() == ([], 0)
    names._begun -= 1  # however coarse the clock is by which files are stamped
    left = ["psm_01234567", "nccl-abcdef", f"torch_{gone}_1_0"]
    used = ["psm_89abcdef", f"torch_{os.getpid()}_1_0"]
    for name in [*left, *used, "checkpoint.pt", "torch_notes", "psm_"]:
        (tmp_path / name).write_bytes(b"four")
    folder = tmp_path / f"joblib_memmapping_folder_{gone}_1"
    folder.mkdir()
    (folder / "array").write_bytes(b"more")
    with (tmp_path / used[0]).open():
        assert names.left() == (sorted(str(tmp_path / name) for name in [*left, folder.name]), 16)


def test_links_are_not_followed(tmp_path: Path) -> None:
    """Another user may have put one there that leads to a folder of this one's, or into one that is left."""
    place, home = tmp_path / "shm", tmp_path / "home"
    for folder in (place, home):
        folder.mkdir()
    names = SharedNames(str(place))
    names._begun -= 1
    (home / "data").write_bytes(b"much")
    (place / "psm_01234567").symlink_to(home)
    left = place / f"joblib_memmapping_folder_{dead()}_1"
    left.mkdir()
    (left / "data").symlink_to(home / "data")
    (left / "folder").symlink_to(home)
    assert names.left() == ([str(left)], 0)


def test_a_file_in_a_folder_that_somebody_has_open(tmp_path: Path) -> None:
    names = SharedNames(str(tmp_path))
    names._begun -= 1
    folder = tmp_path / f"joblib_memmapping_folder_{dead()}_1"
    folder.mkdir()
    (folder / "array").write_bytes(b"more")
    with (folder / "array").open():
        assert names.left() == ([], 0)
    assert names.left() == ([str(folder)], 4)
