"""``request`` on a rank: what pytest knew of the test or fixture, and the module, class and instance there."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mlaunch.pytest.rank.rank_place import Place
from mlaunch.pytest.wire.rank_tests import RequestFacts

_WIDE = ("session", "package", "module")


class NamesWhatIsMissing:
    """An object whose missing attributes raise with what to do instead."""

    _what = ""

    def __getattr__(self, name: str) -> Any:
        __tracebackhide__ = True
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self._what}.{name} does not exist on a rank, where pytest itself does not run; "
            f"use it in a fixture, and give the test what that returns"
        )


class RankRequest(NamesWhatIsMissing):
    """``request`` of a test or a rank_fixture."""

    _what = "request"

    def __init__(
        self,
        facts: RequestFacts,
        config: pytest.Config,
        place: Place,
        end: contextlib.ExitStack,
        values: Mapping[str, Any],
    ) -> None:
        self.config = config
        self.scope, self.fixturename, self.fixturenames = facts.scope, facts.fixturename, list(facts.fixturenames)
        self.node = RankNode(facts, config, place, getattr(end, "marks", []))
        self.keywords = self.node.keywords
        self._end, self._values = end, values
        if facts.param:
            self.param = facts.param[0]
        if facts.scope not in _WIDE[:1]:
            self.path = Path(facts.path)
        if facts.scope not in _WIDE[:2]:
            self.module = place.module
        if facts.scope not in _WIDE:
            self.cls = place.owner
            self.instance = place.instance if facts.scope == "function" else None
        if facts.scope == "function":
            self.function = place.function

    def addfinalizer(self, finalizer: Callable[[], object]) -> None:
        """Call something at the end of the test or fixture."""
        self._end.callback(finalizer)

    def applymarker(self, marker: str | pytest.MarkDecorator) -> None:
        """Give the test a mark that pytest reads after the run: ``xfail``."""
        self.node.add_marker(marker)

    def getfixturevalue(self, name: str) -> Any:
        """Return an argument of the test; others are not set up on a rank."""
        __tracebackhide__ = True
        if name in self._values:
            return self._values[name]
        raise RuntimeError(f"no fixture can be set up on a rank: name {name!r} among the arguments of the test")


class RankNode(NamesWhatIsMissing):
    """``request.node`` of a test or a rank_fixture."""

    _what = "request.node"

    def __init__(self, facts: RequestFacts, config: pytest.Config, place: Place, given: list[pytest.Mark]) -> None:
        self._given = given
        self.name, self.nodeid, self.config = facts.node, facts.nodeid, config
        self.path = Path(facts.path)
        self.own_markers = list(facts.marks)
        self.keywords: dict[str, Any] = dict.fromkeys(facts.keywords, True) | {one.name: one for one in facts.marks}
        self.module, self.cls, self.instance = place.module, place.owner, place.instance
        if facts.originalname is not None:
            self.originalname = facts.originalname
            self.function = self.obj = place.function
        if facts.params is not None:
            test_id = facts.node.partition("[")[2].removesuffix("]")
            self.callspec = types.SimpleNamespace(params=facts.params, id=test_id)

    def add_marker(self, marker: str | pytest.MarkDecorator, append: bool = True) -> None:
        """Give the test a mark; pytest's process gets it with the outcome."""
        mark = (getattr(pytest.mark, marker) if isinstance(marker, str) else marker).mark
        self.own_markers.insert(len(self.own_markers) if append else 0, mark)
        self._given.append(mark)

    def iter_markers(self, name: str | None = None) -> Iterable[pytest.Mark]:
        """Yield the marks, of this name or all, the nearest first."""
        return (mark for mark in self.own_markers if name is None or mark.name == name)

    def get_closest_marker(self, name: str, default: pytest.Mark | None = None) -> pytest.Mark | None:
        """Return the nearest mark of this name."""
        return next(iter(self.iter_markers(name)), default)
