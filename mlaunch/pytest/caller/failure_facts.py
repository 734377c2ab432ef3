"""Failures in ranks for programs: properties in JUnit's file, and annotations of CI services beside lines."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlaunch.core import load
from mlaunch.protocol.failures import kind_of_raised
from mlaunch.pytest.caller.mark import CI_COMMAND, PROPERTIES
from mlaunch.pytest.wire import Verdict

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


def of_verdict(rank: int, verdict: Verdict, error: BaseException) -> FailureFacts:
    """Return the facts of a rank that has raised."""
    crash = getattr(verdict.longrepr, "reprcrash", None)
    message = str(getattr(crash, "message", None) or verdict.reason)
    name = type(error).__name__
    places = verdict.places or ([verdict.crash] if verdict.crash else [])
    return FailureFacts(kind_of_raised(name, verdict.reason), name, message, rank, os.uname().nodename, places)


def of_launch(failure: Mapping[str, Any], message: str = "") -> FailureFacts:
    """Return the facts of a launch. ``failure``: as ``LaunchError.as_dict`` has it."""
    kind, exception = failure["kind"], failure["exception"]
    what = exception["type"] if exception else kind.replace("_", " ")
    text = message or failure["text"].partition("\n\n")[0]
    places = [(frame["file"], frame["line"]) for frame in failure["frames"] or () if not frame["library"]]
    return FailureFacts(kind, what, text, failure["rank"], failure["host"], places)


def note(item: pytest.Item, report: pytest.TestReport, facts: FailureFacts | None) -> None:
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
