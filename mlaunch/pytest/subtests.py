"""Parts of a test on ranks, each with an outcome of its own: the fixture ``subtests``, and ``subTest`` of unittest.

Ranks note them, and pytest's process reports them by its own fixture. Whoever fails in a part waits for the others to
have left it, too: what follows would otherwise meet what they still do there.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any
from unittest.case import _subtest_msg_sentinel  # type: ignore[attr-defined]

import pytest
from _pytest._io.saferepr import saferepr
from _pytest.unittest import TestCaseFunction

from mlaunch.pytest.crossing import Findings, Part, Verdict
from mlaunch.pytest.judgement import Judgement, judge, raise_of
from mlaunch.pytest.rank_request import Place


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


class Shown:
    """Stands for a value of which pytest's process shows what the rank has shown."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


# In pytest's process


def merged(findings: Findings) -> Iterator[tuple[Part, dict[int, Part]]]:
    """Yield each part with that of each rank, in the order in which ranks came to them."""
    of_ranks = {rank: verdict.parts for rank, verdict in sorted(findings.verdicts.items())}
    for number in range(max(map(len, of_ranks.values()), default=0)):
        found = {rank: parts[number] for rank, parts in of_ranks.items() if number < len(parts)}
        yield next(iter(found.values())), found


def report(item: Any, findings: Findings) -> None:
    """Have pytest report the parts of a test, each with its own outcome on all ranks."""
    for part, of_ranks in merged(findings):
        verdicts = {rank: found.verdict or Verdict("passed") for rank, found in of_ranks.items()}
        judgement = judge(Findings(len(verdicts), verdicts))
        values = {name: Shown(text) for name, text in part.values.items()}
        if isinstance(item, TestCaseFunction):
            sentinel = _subtest_msg_sentinel if part.message is None else part.message
            item.addSubTest(None, types.SimpleNamespace(_message=sentinel, params=values), _raised(judgement))  # type: ignore[arg-type]
        else:
            with item.funcargs["subtests"].test(part.message, **values):
                raise_of(judgement)


def _raised(judgement: Judgement) -> Any:
    try:
        raise_of(judgement)
    except BaseException:  # also of pytest's own kinds
        return sys.exc_info()
    return None
