"""Ranks that stay have the code of the moment at which they imported it."""

from __future__ import annotations

import importlib
import os
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlaunch import Ranks, launcher
from tests import launches
from tests.processes import wait_until

Write = Callable[[str], None]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks(n_gpus=2) as opened:
        yield opened


@pytest.fixture
def name() -> str:
    return f"module_{uuid.uuid4().hex}"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[Write]:
    """Writes the module, each time with a later time of change."""
    monkeypatch.syspath_prepend(str(tmp_path))
    times = iter(range(1_700_000_000, 1_800_000_000, 10))

    def put(text: str) -> None:
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        at = next(times)
        os.utime(path, (at, at))
        importlib.invalidate_caches()

    yield put
    sys.modules.pop(name, None)


def answer_of(name: str) -> int:
    return int(importlib.import_module(name).answer())


@pytest.fixture
def informed(write: Write, name: str) -> Iterator[Ranks]:
    """Ranks that have imported the module in which the answer is 1."""
    write("def answer(): return 1\n")
    with Ranks(n_gpus=2) as ranks:
        assert ranks.run(answer_of, name) == [1, 1]
        yield ranks


def test_a_changed_module_is_named_once_for_each_change(informed: Ranks, write: Write, name: str) -> None:
    write("def answer(): return 2 + 0\n")
    with pytest.warns(RuntimeWarning, match=f"the ranks run older code than the files of {name} hold"):
        assert informed.run(answer_of, name) == [1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert informed.run(answer_of, name) == [1, 1]
    write("def answer(): return 3 + 0\n")
    with pytest.warns(RuntimeWarning, match=rf"{name} hold, since .*; ranks\.reload\(\) loads it"):
        assert informed.run(answer_of, name) == [1, 1]
    assert informed.reload() == [name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert informed.run(answer_of, name) == [3, 3]
        assert informed.reload() == []


def test_shared_ranks_are_replaced(write: Write, name: str) -> None:
    """Nobody has a handle by which to reload them."""
    write("def answer(): return 1\n")
    answer = launcher(answer_of, 1, keep=600)
    try:
        assert answer(name) == [1]
        write("def answer(): return 2 + 0\n")
        with pytest.warns(RuntimeWarning, match=f"{name} hold.*; new ranks, which have it, run the next call"):
            assert answer(name) == [1]
        assert answer(name) == [2]
    finally:
        launches.end_sets_that_stay()


def test_functions_that_travel_by_value_are_current(ranks: Ranks) -> None:
    for number in range(3):
        scope: dict[str, Callable[[], int]] = {}
        exec(f"def current(): return {number}", scope)
        assert ranks.run(lambda scope=scope["current"]: scope()) == [number] * 2


@pytest.mark.filterwarnings("ignore:the ranks run older code")
def test_a_reload_that_fails_on_one_rank_changes_none(informed: Ranks, write: Write, name: str) -> None:
    write("import os\ndef answer(): return 2 + 0\nif os.environ['RANK'] == '1': raise ValueError('no such luck')\n")
    with pytest.raises(RuntimeError, match=r"(?s)nothing was reloaded: rank 1 failed:.*no such luck"):
        informed.reload()
    assert informed.run(answer_of, name) == [1, 1]
    write("def answer(): return 300\n")
    assert informed.reload() == [name]
    assert informed.run(answer_of, name) == [300, 300]


@pytest.mark.filterwarnings("ignore:the ranks run older code")
def test_a_reload_names_held_objects_that_keep_their_class(write: Write, name: str) -> None:
    write("class Model: size = 1\n")
    with Ranks(n_gpus=2) as ranks:
        held = ranks.hold(lambda name: importlib.import_module(name).Model(), name)
        write("class Model: size = 20\n")
        with pytest.warns(RuntimeWarning, match=r"the held values \d+ keep their classes from before the reload"):
            assert ranks.reload() == [name]
        assert ranks.run(lambda model: model.size, held) == [1, 1]


def answer_after(name: str, imported: str, edited: str) -> int:
    module = importlib.import_module(name)
    Path(imported + os.environ["RANK"]).touch()
    wait_until(Path(edited).exists)
    return int(module.answer())


def test_a_module_that_is_edited_while_the_call_runs_that_has_imported_it(
    name: str, write: Write, ranks: Ranks, tmp_path: Path
) -> None:
    write("def answer(): return 1\n")
    imported, edited = tmp_path / "imported", tmp_path / "edited"
    future = ranks.submit(answer_after, name, str(imported), str(edited))
    wait_until(lambda: all(Path(f"{imported}{rank}").exists() for rank in range(2)) or future.done())
    write("def answer(): return 2\n")

    def end() -> list[list[int]]:
        edited.touch()
        return [future.result(60), ranks.run(answer_of, name)]

    with pytest.warns(RuntimeWarning, match=name):
        assert end() == [[1, 1], [1, 1]]
    assert ranks.reload() == [name]
    assert ranks.run(answer_of, name) == [2, 2]
