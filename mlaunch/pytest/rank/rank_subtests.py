"""Parts of a test on ranks, each with an outcome of its own: the fixture ``subtests``, and ``subTest`` of unittest.

Ranks note them, and pytest's process reports them by its own fixture. Whoever fails in a part waits for the others to
have left it, too: what follows would otherwise meet what they still do there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import pytest
from _pytest._io.saferepr import saferepr

from mlaunch.pytest.rank.rank_request import Place
from mlaunch.pytest.wire.rank_tests import Part


class RankSubtests:
    """The fixture ``subtests`` on a rank."""

    def __init__(self, parts: list[Part], place: Place) -> None:
        self._parts, self._place = parts, place

    def test(self, msg: str | None = None, **kwargs: Any) -> _RankPart:
        """Return a context manager for a part of the test, whose failure does not end the test."""
        return _RankPart(self._parts, self._place, msg, kwargs)


class _RankPart:
    def __init__(self, parts: list[Part], place: Place, msg: str | None, kwargs: Mapping[str, Any]) -> None:
        self._parts, self._place = parts, place
        self._msg, self._kwargs = msg, {name: saferepr(value) for name, value in kwargs.items()}

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> bool:
        __tracebackhide__ = True
        if isinstance(error, KeyboardInterrupt | pytest.exit.Exception):
            return False
        described = None if error is None else self._place.describe(error)
        self._parts.append(Part(self._msg, self._kwargs, described))
        return self._place.leave_part(failed=error is not None)
