"""The one outcome of a test on all of its ranks, and pytest's report of it, for people and for programs.

A failure wins over a skip, and ranks skip together or not at all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import re
import sys
import textwrap
import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.case import _subtest_msg_sentinel  # type: ignore[attr-defined]

import pytest
from _pytest.unittest import TestCaseFunction

from mlaunch.base.exceptions import LaunchError, LaunchTimeout
from mlaunch.base.frames import mentions_bottom
from mlaunch.base.text import name_ranks
from mlaunch.core import load
from mlaunch.protocol.failures import kind_of_raised
from mlaunch.pytest import wire
from mlaunch.pytest.caller.mark import CI_COMMAND, PROPERTIES
from mlaunch.pytest.rank.run_test import EndedAloneError
from mlaunch.pytest.wire import Findings, Part, RankTest, Verdict
from mlaunch.rank import in_step

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_WORDS = {"passed": "passed", "failed": "failed", "skipped": "skipped", "xfailed": "called pytest.xfail()"}


@dataclass
class Judgement:
    """``error``: what the test is to raise; None: it has passed. ``longrepr``: what is shown instead of its traceback.

    ``sections``: what else the report has, as titles and texts; ``crash``: where it was skipped; ``facts``: why it
    has failed.
    """

    error: BaseException | None = None
    longrepr: Any = None
    sections: Sequence[tuple[str, str]] = ()
    crash: tuple[str, int] | None = None
    facts: FailureFacts | None = None


def findings_of(error: Exception, report: LaunchError, test: RankTest, size: int, log: int, after: str) -> Findings:
    """Return the findings of a test whose call has failed.

    ``report``: the launch's; ``after``: a line for the report of the test on what happens next.
    """
    found = {rank: value for rank, value in report.results.items() if isinstance(value, Verdict)}
    text = str(report).replace("run_test()", test.name)
    apart = isinstance(error, EndedAloneError)
    told = text.partition("\nmeanwhile:\n")[2] if apart else text
    stacks = {rank: _of_the_test(stack) for rank, stack in report.stacks.items()}
    stacks = stacks if isinstance(error, LaunchTimeout) else {}
    verdicts = {**found, **wire.take_verdicts(log)}
    return Findings(size, verdicts, f"{textwrap.dedent(told)}\n{after}".strip(), report.as_dict(), apart, stacks)


def _of_the_test(stack: str) -> str:
    """Return a stack without what is below the test."""
    return "\n".join(itertools.takewhile(lambda line: not mentions_bottom(line), stack.splitlines()))


def judge(findings: Findings) -> Judgement:
    """Return the outcome of a test."""
    verdicts = findings.verdicts
    outcomes = {rank: verdict.outcome for rank, verdict in verdicts.items()}
    if leaving := [verdict for verdict in verdicts.values() if verdict.outcome == "exit"]:
        return Judgement(_raised(leaving[0]))
    if findings.told and not findings.apart:
        return _failed(findings, findings.told, facts_of_launch(findings.failure, findings.told))
    if "failed" in outcomes.values():
        cause = _cause(verdicts)
        error, sections = _raised(verdicts[cause]), _sections(findings, cause)
        facts = facts_of_verdict(cause, verdicts[cause], error)
        return Judgement(error, verdicts[cause].longrepr, sections, facts=facts)
    if len(verdicts) == findings.size and len(set(outcomes.values())) == 1:
        return _agreed(verdicts[min(verdicts)])
    text = _disagreement(findings)
    return _failed(findings, text, FailureFacts("failed", "ranks disagree", text))


def _failed(findings: Findings, text: str, facts: FailureFacts) -> Judgement:
    """Return the judgement on a test that has failed without an exception of its own."""
    return Judgement(pytest.fail.Exception(text, pytrace=False), text, _sections(findings, None), facts=facts)


def is_out_of_step(findings: Findings) -> bool:
    """True if all ranks are done, but have not entered the same collectives: they would not meet in the next test.

    False for a call that the launcher has ended: it knows by itself.
    """
    verdicts = findings.verdicts
    if findings.told or len(verdicts) < findings.size:
        return False
    told = [dict(verdicts[rank].entered) for rank in sorted(verdicts)]
    passed = all(verdict.outcome == "passed" for verdict in verdicts.values())
    if passed and any(numbers.get(in_step.MESSAGES, ((), 0))[1] is None for numbers in told):
        return False  # backends count messages among their operations; a test that passes has received its own
    for numbers in told:
        numbers.pop(in_step.GROUPS, None)  # each test names its groups by itself
    return not in_step.agree(told)


def _agreed(verdict: Verdict) -> Judgement:
    if verdict.outcome == "skipped":
        # A skip by unittest has no place of its own: pytest then shows the test's.
        error = pytest.skip.Exception(verdict.reason, _use_item_location=verdict.crash is None)
        return Judgement(error, crash=verdict.crash)
    if verdict.outcome == "xfailed":
        return Judgement(pytest.xfail.Exception(verdict.reason), verdict.longrepr)
    return Judgement()


def _cause(verdicts: dict[int, Verdict]) -> int:
    """Return the rank whose failure is shown first: the earliest, or of equal ones the lowest rank's."""
    failed = {rank: verdict for rank, verdict in verdicts.items() if verdict.outcome == "failed"}
    earliest = min(failed, key=lambda rank: failed[rank].at)
    # All ranks of most failures raise the same within milliseconds; rank 0's is then what people expect to see.
    return min(rank for rank in failed if _shown(failed[rank]) == _shown(failed[earliest]))


def _shown(verdict: Verdict) -> str:
    """Return the text of a failure without addresses of objects, which differ between processes."""
    return _ADDRESS.sub("0x", str(verdict.longrepr))


def _raised(verdict: Verdict) -> BaseException:
    """Return the exception of the rank, or one with its text if it cannot be pickled."""
    if verdict.error is not None:
        found = pickle.loads(verdict.error)
        if isinstance(found, BaseException):
            return found
    return pytest.fail.Exception(verdict.reason, pytrace=False)


def _sections(findings: Findings, cause: int | None) -> list[tuple[str, str]]:
    """Return the sections of the report: outcomes by rank, failures that differ from the first, and stacks."""
    verdicts = findings.verdicts
    shown = set() if cause is None else {_shown(verdicts[cause])}
    found = [("ranks", _who(findings))] if findings.size > 1 and verdicts else []
    for rank in sorted(verdicts):
        if verdicts[rank].outcome == "failed" and _shown(verdicts[rank]) not in shown:
            shown.add(_shown(verdicts[rank]))
            found.append((f"rank {rank}", str(verdicts[rank].longrepr)))
    return found + [(f"stack of rank {rank}", text) for rank, text in sorted(findings.stacks.items())]


def _who(findings: Findings) -> str:
    alike: dict[str, list[int]] = {}
    for rank, verdict in sorted(findings.verdicts.items()):
        alike.setdefault(_WORDS[verdict.outcome], []).append(rank)
    lines = [f"{name_ranks(ranks)} {word}" for word, ranks in alike.items()]
    return "\n".join([*lines, *([findings.told] if findings.apart and findings.told else [])])


def _disagreement(findings: Findings) -> str:
    reasons = dict.fromkeys(one.reason for one in findings.verdicts.values() if one.reason)
    return f"a test skips on all of its ranks or on none: {'; '.join(_parts(findings))} ({'; '.join(reasons)})"


def _parts(findings: Findings) -> Iterable[str]:
    yield from _who(findings).splitlines()
    missing = sorted(set(range(findings.size)) - findings.verdicts.keys())
    if missing and not findings.told:
        yield f"{name_ranks(missing)} did not answer"


_JUDGED = "_mlaunch_judgement"  # the attribute of an error with what its report shows


def raise_of(judgement: Judgement) -> None:
    """Raise the error of a test, or of a step for one of its fixtures, if there is one."""
    if judgement.error is not None:
        judgement.error.__dict__[_JUDGED] = judgement
        raise judgement.error


def judgement_of(error: BaseException | None) -> Judgement | None:
    """Return the judgement that an error was raised for, or None."""
    found = None if error is None else getattr(error, _JUDGED, None)
    return found if isinstance(found, Judgement) else None


def show(report: pytest.TestReport, judgement: Judgement) -> None:
    """Show a rank's traceback in place of that of mlaunch."""
    if judgement.longrepr is not None and not report.passed:
        report.longrepr = judgement.longrepr
    elif report.skipped and judgement.crash is not None and not hasattr(report, "wasxfail"):
        report.longrepr = (*judgement.crash, f"Skipped: {judgement.error}")
    report.sections.extend(judgement.sections)


def _logged(findings: Findings) -> Iterable[tuple[str, str]]:
    """Yield the logs of ranks as titled sections; one section if all ranks logged the same."""
    texts = {rank: verdict.logged for rank, verdict in sorted(findings.verdicts.items()) if verdict.logged}
    if len(texts) == findings.size and len(set(texts.values())) == 1:
        yield "log", next(iter(texts.values()))
    else:
        yield from ((f"log of rank {rank}", text) for rank, text in texts.items())


def warn_of(findings: Findings) -> None:
    """Issue the warnings of ranks here, equal ones once."""
    told = dict.fromkeys(warning for verdict in findings.verdicts.values() for warning in verdict.warnings)
    for text, pickled, file, line in told:
        # With the instance itself: to make one of its text calls a constructor that may want something else.
        warnings.warn_explicit(_warning(text, pickled), None, file, line)


def pass_on(item: pytest.Function, findings: Findings) -> None:
    """Record properties, marks and logs of ranks; issue their warnings, and warn of what a test has left there."""
    verdicts = findings.verdicts
    if verdicts:
        item.user_properties.extend(verdicts[min(verdicts)].properties)
        for mark in verdicts[min(verdicts)].marks:
            item.add_marker(getattr(pytest.mark, mark.name).with_args(*mark.args, **mark.kwargs))
    for title, text in _logged(findings):
        item.add_report_section("call", title, text)
    warn_of(findings)
    for text in _left({rank: verdict.left for rank, verdict in sorted(verdicts.items())}):
        warnings.warn(pytest.PytestWarning(text), stacklevel=1)


def _left(found: Mapping[int, Sequence[str]]) -> Iterable[str]:
    """Yield a sentence for each kind of thing that ranks have left; numbers (pids) do not make kinds."""
    counts: dict[str, dict[int, int]] = {}
    for rank, left in found.items():
        for what in left:
            of_ranks = counts.setdefault(what.rstrip("0123456789").strip(), {})
            of_ranks[rank] = of_ranks.get(rank, 0) + 1
    for what, of_ranks in counts.items():
        ranks, most = sorted(of_ranks), max(of_ranks.values())
        if most == 1:
            yield f"the test left a {what} on {name_ranks(ranks)}"
        else:
            kind, _, name = what.partition(" ")
            several = f"{kind}{'es' if kind.endswith('s') else 's'} {name}".strip()
            numbers = "" if len(set(of_ranks.values())) == 1 else "up to "
            where = f"{'each of ' if len(ranks) > 1 else ''}{name_ranks(ranks)}"
            yield f"the test left {numbers}{most} {several} on {where}"


def _warning(text: str, pickled: bytes | None) -> Warning:
    """Return the warning of the rank; if it cannot be pickled, one with its text."""
    if pickled is not None:
        with contextlib.suppress(Exception):  # whatever its class may raise here
            found = pickle.loads(pickled)
            if isinstance(found, Warning) and str(found) == text:
                return found
    return UserWarning(text)


# Parts of a test


class Shown:
    """A value of a rank, of which pytest's process has only the ``repr``."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def report_parts(item: Any, findings: Findings) -> None:
    """Have pytest's own fixture report the parts of a test (subtests), each with one outcome of all ranks."""
    parts = {rank: verdict.parts for rank, verdict in sorted(findings.verdicts.items())}
    for number in range(max(map(len, parts.values()), default=0)):
        _report_part(item, {rank: of_rank[number] for rank, of_rank in parts.items() if number < len(of_rank)})


def _report_part(item: Any, of_ranks: Mapping[int, Part]) -> None:
    part = next(iter(of_ranks.values()))
    judgement = judge(
        Findings(len(of_ranks), {rank: one.verdict or Verdict("passed") for rank, one in of_ranks.items()})
    )
    values = {name: Shown(text) for name, text in part.values.items()}
    if isinstance(item, TestCaseFunction):
        sentinel = _subtest_msg_sentinel if part.message is None else part.message
        item.addSubTest(None, types.SimpleNamespace(_message=sentinel, params=values), _raised_by(judgement))  # type: ignore[arg-type]
    else:
        with item.funcargs["subtests"].test(part.message, **values):
            raise_of(judgement)


def _raised_by(judgement: Judgement) -> Any:
    try:
        raise_of(judgement)
    except BaseException:  # also of pytest's own kinds
        return sys.exc_info()
    return None


# Facts for programs: properties in JUnit's file, and annotations of CI services beside lines

_LIKE_OURS = "pytest_github_actions_annotate_failures"  # a plugin that does this for all tests
Places = Sequence[tuple[str, int]]  # files and lines of the user's, the innermost call first


@dataclass(frozen=True)
class FailureFacts:
    """Why a test on ranks has failed. ``kind``: as in ``docs/schema.json``; ``what``: the exception, or the kind."""

    kind: str
    what: str
    message: str
    rank: int | None = None
    host: str | None = None
    places: Places = ()


def facts_of_verdict(rank: int, verdict: Verdict, error: BaseException) -> FailureFacts:
    """Return the facts of a rank that has raised."""
    crash = getattr(verdict.longrepr, "reprcrash", None)
    message = str(getattr(crash, "message", None) or verdict.reason)
    name = type(error).__name__
    places = verdict.places or ([verdict.crash] if verdict.crash else [])
    return FailureFacts(kind_of_raised(name, verdict.reason), name, message, rank, os.uname().nodename, places)


def facts_of_launch(failure: Mapping[str, Any], message: str = "") -> FailureFacts:
    """Return the facts of a launch. ``failure``: as ``LaunchError.as_dict`` has it."""
    kind, exception = failure["kind"], failure["exception"]
    what = exception["type"] if exception else kind.replace("_", " ")
    text = message or failure["text"].partition("\n\n")[0]
    places = [(frame["file"], frame["line"]) for frame in failure["frames"] or () if not frame["library"]]
    return FailureFacts(kind, what, text, failure["rank"], failure["host"], places)


def note_facts(item: pytest.Item, report: pytest.TestReport, facts: FailureFacts | None) -> None:
    """Add the facts of a failure to a report, and to later reports of the test."""
    if not report.failed or facts is None:
        return
    place = facts.places[0] if facts.places else None
    shown = None if place is None else f"{_from(item.config.rootpath, place[0])}:{place[1]}"
    known = {"kind": facts.kind, "rank": facts.rank, "host": facts.host, "place": shown}
    _record(item, report, {name: value for name, value in known.items() if value is not None})
    service = load.at_hand("ci", "caller")
    if service is not None and service.is_asked() and not item.config.pluginmanager.has_plugin(_LIKE_OURS):
        file, line, _ = report.location
        rank = "" if facts.rank is None else f", rank {facts.rank}"
        places = [*facts.places, (str(item.config.rootpath / file), (line or 0) + 1)]
        command = service.error_command(f"{report.nodeid}{rank}: {facts.what}", facts.message, places)
        setattr(report, CI_COMMAND, command)


def note_size(item: pytest.Item, report: pytest.TestReport, size: int) -> None:
    """Add to a report on how many ranks the test runs."""
    _record(item, report, {"ranks": size})


def _record(item: pytest.Item, report: pytest.TestReport, known: Mapping[str, object]) -> None:
    found = [(f"{PROPERTIES}{name}", value) for name, value in known.items()]
    item.user_properties.extend(found)
    report.user_properties.extend(found)  # which has a copy of those before


def _from(root: Path, file: str) -> str:
    path = os.path.relpath(file, root)
    return file if path.startswith(os.pardir) else path
