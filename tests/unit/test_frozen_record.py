"""A frozen record is what dataclass(frozen=True) makes of a class."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import pytest

from mlaunch.base.frozen_record import frozen_record
from tests.conftest import ROOT


def define(decorate: Callable[[type], type]) -> Any:
    class Record:
        """A record."""

        first: int
        second: str = "b"
        made: list[int] = field(default_factory=list)
        hidden: str = field(default="secret", repr=False)
        beside: int = field(default=0, compare=False)
        later: int = field(init=False, repr=False)
        _: KW_ONLY
        named: int = 7
        wanted: int

        def __post_init__(self) -> None:
            object.__setattr__(self, "later", self.first + 1)

    return decorate(Record)


OURS, THEIRS = define(frozen_record), define(dataclass(frozen=True))
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {"wanted": 2}),
    ((1, "c", [3]), {"wanted": 2, "named": 4}),
    ((), {"first": 1, "wanted": 2, "hidden": "x", "beside": 9}),
]
WRONG: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((1,), {}),
    ((1, "b", [], "x", 0, 5), {"wanted": 2}),
    ((1,), {"first": 1, "wanted": 2}),
    ((1,), {"wanted": 2, "unknown": 3}),
    ((1,), {"wanted": 2, "later": 3}),
]

LISTING = """
import json, sys, mlaunch.run.command, mlaunch.run.command.run_job
print(json.dumps([module.__file__ for name, module in sys.modules.items() if name.startswith("mlaunch.")]))
"""


@frozen_record
class Sent:
    """One that pickle finds."""

    value: int
    more: tuple[int, ...] = ()


@frozen_record
class Longer(Sent):
    """One with a field more."""

    last: str = "z"


@pytest.mark.parametrize(("given", "named"), CALLS)
def test_values_and_text_are_those_of_a_dataclass(given: tuple[Any, ...], named: dict[str, Any]) -> None:
    ours, theirs = OURS(*given, **named), THEIRS(*given, **named)
    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
    assert repr(ours) == repr(theirs)
    assert [each.name for each in dataclasses.fields(ours)] == [each.name for each in dataclasses.fields(theirs)]
    assert OURS.__match_args__ == THEIRS.__match_args__


@pytest.mark.parametrize(("given", "named"), WRONG)
def test_arguments_that_a_dataclass_does_not_take_are_refused_in_words(
    given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    with pytest.raises(TypeError):
        THEIRS(*given, **named)
    with pytest.raises(TypeError, match=r"^Record: (missing|got|multiple|too many)"):
        OURS(*given, **named)


def test_equal_ones_are_equal_and_have_one_hash() -> None:
    assert Sent(1, (2,)) == Sent(1, (2,)) != Sent(1)
    assert hash(Sent(1, (2,))) == hash(Sent(1, (2,))) == hash((1, (2,)))
    assert Sent(1) != Longer(1)
    assert OURS(1, wanted=2, beside=1) == OURS(1, wanted=2, beside=5) != OURS(1, wanted=3)
    assert OURS(1, wanted=2).made is not OURS(1, wanted=2).made


def test_none_can_be_changed() -> None:
    sent = Sent(1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'value'"):
        sent.value = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'value'"):
        del sent.value
    assert dataclasses.replace(sent, value=2) == Sent(2)


def test_a_record_goes_through_a_pickle_and_is_inherited() -> None:
    assert pickle.loads(pickle.dumps(Longer(1, (2,), "y"))) == Longer(1, (2,), "y")
    assert repr(Longer(1)) == "Longer(value=1, more=(), last='z')"


def test_methods_of_the_class_itself_stay() -> None:
    @frozen_record
    class Own:
        """One with its own equality."""

        value: int

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 3

        def __repr__(self) -> str:
            return "own"

    assert Own(1) == Own(2)
    assert repr(Own(1)) == "own"
    assert hash(Own(1)) == 3


def test_inspect_and_help_know_what_it_takes() -> None:
    assert str(inspect.signature(Sent)) == "(value: 'int', more: 'tuple[int, ...]' = ())"
    taken, theirs = inspect.signature(OURS).parameters, inspect.signature(THEIRS).parameters
    assert [(each.name, each.kind) for each in taken.values()] == [(each.name, each.kind) for each in theirs.values()]


def test_a_command_defines_no_frozen_record_by_generated_code() -> None:
    done = subprocess.run([sys.executable, "-c", LISTING], capture_output=True, text=True, check=True, cwd=ROOT)
    for file in json.loads(done.stdout):
        with open(file, encoding="utf-8") as source:
            classes = [node for node in ast.walk(ast.parse(source.read())) if isinstance(node, ast.ClassDef)]
        decorators = [ast.unparse(decorator) for node in classes for decorator in node.decorator_list]
        assert not [text for text in decorators if "frozen=True" in text], file
