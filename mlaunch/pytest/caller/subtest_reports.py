"""Parts of a test on ranks are reported by pytest's own fixture, each with one outcome of all ranks."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest.case import _subtest_msg_sentinel  # type: ignore[attr-defined]

from _pytest.unittest import TestCaseFunction

from mlaunch.pytest.caller.judgement import Judgement, judge, raise_of
from mlaunch.pytest.wire.rank_tests import Findings, Part, Verdict


class Shown:
    """Stands for a value of which pytest's process shows what the rank has shown."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


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
