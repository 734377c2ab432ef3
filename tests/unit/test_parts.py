"""The parts of features: made where they are asked for, refused in words, given up whatever happens."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

import mlaunch
from mlaunch import launcher
from mlaunch.agent.scene import AgentParts
from mlaunch.core import load
from mlaunch.core.load import CallerParts, as_keyword
from mlaunch.features import Feature
from mlaunch.run.command.flags import as_flag

NOTES = """
from mlaunch.core.parts import CallerPart

class Notes(CallerPart):
    section = "{name}"
    def planned(self, spec): print("{name} planned", spec.world_size, flush=True)
    def settled(self, ended, tell): tell("{name} settled")
    def close(self):
        print("{name} closed")
        if "{name}" == "second":
            raise OSError("second cannot be closed")

def part(options, spell):
    if getattr(options, "refuses", "") == "{name}":
        raise ValueError(spell("refuses", "{name}"))
    return Notes()
"""
RANK = """
import contextlib
from mlaunch.core.parts import RankPart

class Around(RankPart):
    def __init__(self, section, rank):
        self.name = f"{section} of rank {rank}"
        self.place, self.decides = section, ("affinity", section)
    def begin(self, spec, local_rank):
        return {"OMP_NUM_THREADS": "5", "FROM": self.name}
    @contextlib.contextmanager
    def around_call(self):
        print("begin", self.name, flush=True)
        yield
        print("end", self.name, flush=True)

part = Around
"""


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two features, in folders outside of the package's."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "caller.py").write_text(NOTES.replace("{name}", name))
        (tmp_path / name / "rank.py").write_text(dedent(RANK))
    monkeypatch.setattr(mlaunch, "__path__", [*mlaunch.__path__, str(tmp_path)])
    features = (
        Feature("first", ("seed",), lambda given: given["seed"] is not None, hooks=("rank.part",)),
        Feature("second", ("log_dir",), lambda given: given["log_dir"] is not None, hooks=("rank.part",)),
    )
    monkeypatch.setattr("mlaunch.features.FEATURES", features)
    monkeypatch.setattr(load, "FEATURES", features)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("mlaunch.first", "mlaunch.second")):
            del sys.modules[name]


def asked(**given: Any) -> Any:
    return SimpleNamespace(**{"seed": None, "log_dir": None, "refuses": ""} | given)


@pytest.mark.usefixtures("two")
def test_only_what_is_asked_for_is_imported() -> None:
    with CallerParts(asked()) as parts:
        assert parts.sections == {}
    with CallerParts(asked(seed=1)) as parts:
        assert parts.sections == {"first": "first"}
    assert "mlaunch.second" not in sys.modules


@pytest.mark.usefixtures("two")
def test_parts_hear_and_are_closed_in_the_order_in_which_they_surround_a_call(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All are closed, though one cannot be."""
    said: list[str] = []
    parts = CallerParts(asked(seed=1, log_dir="d"))
    parts.planned(SimpleNamespace(world_size=3))  # type: ignore[arg-type]
    parts.settled(SimpleNamespace(error=None), said.append)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="second cannot be closed"), parts:
        pass
    assert said == ["second settled", "first settled"]
    assert capsys.readouterr().out.splitlines() == [
        "first planned 3",
        "second planned 3",
        "second closed",
        "first closed",
    ]


@pytest.mark.usefixtures("two")
def test_a_part_that_refuses_a_call_has_the_others_closed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="refuses='second'"):
        CallerParts(asked(seed=1, log_dir="d", refuses="second"))
    assert capsys.readouterr().out == "first closed\n"


def test_a_feature_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "mlaunch.features.FEATURES", (Feature("absent", ("seed",), lambda given: given["seed"] is not None),)
    )
    words = "seed=3: this installation of mlaunch lacks mlaunch/absent, which does it; install mlaunch again, or do"
    with pytest.raises(ModuleNotFoundError, match=words):
        CallerParts(asked(seed=3))


def test_who_looks_hears_that_a_feature_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command may be of another installation than the launch."""
    monkeypatch.setattr("mlaunch.agent.scene.FEATURES", (Feature("absent", (), lambda _: False, words=(b"how",)),))
    told: list[object] = []
    launch: Any = SimpleNamespace(_parts={})
    AgentParts.asked(launch, b"how", told.append)
    assert told == [{"refused": "the launch's installation of mlaunch lacks mlaunch/absent, which answers that"}]


@pytest.mark.parametrize(
    ("option", "value", "keyword", "flag"),
    [
        ("profile", "a b", "profile='a b'", "--profile a b"),
        ("profile_ranks", (0, 1), "profile_ranks=[0, 1]", "--profile-ranks 0,1"),
    ],
)
def test_how_options_are_spelled(option: str, value: object, keyword: str, flag: str) -> None:
    assert (as_keyword(option, value), as_flag(option, value)) == (keyword, flag)


@pytest.mark.usefixtures("two")
def test_parts_of_ranks_surround_the_function(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="it starts ranks")

    def run() -> tuple[str, str]:
        print("run", flush=True)
        return os.environ["FROM"], os.environ["OMP_NUM_THREADS"]

    call = launcher(run, 1, seed=1, start_method="fork", output="raw", env={"OMP_NUM_THREADS": "2"})
    with pytest.warns(RuntimeWarning, match="first settled"):
        assert call() == [("first of rank 0", "2")]
    assert "begin first of rank 0\nrun\nend first of rank 0\n" in capfd.readouterr().out
    assert call.last is not None
    assert call.last.ranks[0].place == "first"


class Around:
    """Holds what is to be seen of it. ``fails``: as it is entered."""

    def __init__(self, said: list[str], *, fails: bool = False) -> None:
        self._said, self._fails = said, fails

    def around_call(self) -> Around:
        return self

    def __enter__(self) -> None:
        if self._fails:
            raise OSError("no room")
        self._said.append("entered")

    def __exit__(self, *_: object) -> None:
        self._said.append("left")


def test_what_surrounds_a_function_is_left_if_another_part_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    rooms = {"first": Around(said), "second": Around(said, fails=True)}
    monkeypatch.setattr(load, "module_of", lambda name, _: SimpleNamespace(part=lambda *_: rooms[name]))
    features = [Feature(name, (), bool, hooks=("rank.part",)) for name in rooms]
    monkeypatch.setattr("mlaunch.features.FEATURES", features)
    with pytest.raises(OSError, match="no room"):
        load.RankParts(SimpleNamespace(sections=dict.fromkeys(rooms), rank=int), 0, {}).around_call()  # type: ignore[arg-type]
    assert said == ["entered", "left"]


def test_a_command_that_lacks_a_library_is_no_feature_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def lack(name: str) -> Any:
        def find(feature: str, _process: str) -> Any:
            raise ModuleNotFoundError(name=name.format(feature))

        return find

    monkeypatch.setattr(load, "module_of", lack("mlaunch.{}"))
    assert list(load.findings()) == []
    monkeypatch.setattr(load, "module_of", lack("rich"))
    with pytest.raises(ModuleNotFoundError):
        list(load.findings())
