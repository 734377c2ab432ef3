"""What ranks import anew: told while it lasts, summed up for the call, and said once."""

from __future__ import annotations

import importlib.machinery
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlaunch.caller.launch import call
from mlaunch.protocol import late_imports
from mlaunch.protocol.board import Board
from mlaunch.rank import rank_imports


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    """That of two ranks, of which this process is the second; packages are those in a directory of the test's."""
    loader = importlib.machinery.SourceFileLoader
    monkeypatch.setattr(loader, "exec_module", loader.exec_module)
    monkeypatch.setattr(rank_imports, "_PACKAGES", (str(tmp_path / "packages"),))
    monkeypatch.setattr(rank_imports, "_timing", rank_imports._Timing())
    monkeypatch.setattr(rank_imports, "_LONG", 0.0)
    monkeypatch.setattr(call, "_imports", {})
    monkeypatch.setattr(call, "_TOLD_AT", 2)
    (tmp_path / "packages" / "big").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Board.create(2)
    rank_imports.time_imports()
    rank_imports.begin_timing(made, 1)
    yield made
    made.close()
    for name in ("big", "big.part", "mine", "broken"):
        sys.modules.pop(name, None)


def test_a_package_counts_from_its_outermost_module(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    spy = SimpleNamespace(look=lambda: seen.append(board.importing(1)))
    monkeypatch.setitem(sys.modules, "spy", spy)  # type: ignore[arg-type]
    (tmp_path / "packages" / "big" / "__init__.py").write_text("import big.part, spy; spy.look()")
    (tmp_path / "packages" / "big" / "part.py").write_text("import spy; spy.look()")
    (tmp_path / "mine.py").write_text("import spy; spy.look(); import big")
    __import__("mine")
    assert seen == ["", "big", "big"]
    assert (board.importing(1), board.imported(1)) == ("", ("", ""))
    rank_imports.note_slowest()
    assert (board.importing(1), board.imported(1), board.imported(0)) == ("", ("big", "0.0"), ("", ""))
    board.note_imported(0, "big", 4.125)
    for _ in range(3):
        call.tell_imports("train()", board)
    assert capfd.readouterr().err == (
        "mlaunch: train() imports big again in the ranks of each call, 4.1 s in this one; to import it once: "
        "mlaunch.warm_up(preload=['big']) before the first call, provided that it starts no thread and uses no device\n"
    )


def test_an_import_that_fails_shows_no_frames_of_ours(board: Board, tmp_path: Path) -> None:
    (tmp_path / "packages" / "broken.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError) as caught:
        __import__("broken")
    files = [Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files == ["test_imports.py", "broken.py"]
    assert board.importing(1) == ""


@pytest.mark.usefixtures("board")
def test_a_late_import_is_noted_as_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call may raise, end, or meet its deadline before it returns; it is told of when it is through."""
    told: list[str] = []
    monkeypatch.setattr(late_imports, "_INDEX", {"big": 0})
    monkeypatch.setattr(late_imports, "tell", lambda: told.append("told"))
    spy = SimpleNamespace(look=lambda: told.append(f"noted {late_imports._noted[0]}"))
    monkeypatch.setitem(sys.modules, "spy", spy)  # type: ignore[arg-type]
    (tmp_path / "packages" / "big" / "__init__.py").write_text("import spy; spy.look(); 1 / 0")
    (tmp_path / "mine.py").write_text("import big")  # from wherever it is imported
    before = late_imports._noted[0]
    late_imports._noted[0] = 0
    try:
        with pytest.raises(ZeroDivisionError):
            __import__("mine")
        assert told == ["noted 1", "told"]
    finally:
        late_imports._noted[0] = before
