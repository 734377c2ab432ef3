"""What crosses between pytest's process and the ranks of a test."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlaunch.protocol import payload
from mlaunch.rank.in_step import Numbers


@dataclass(frozen=True)
class Definition:
    """Where a test is defined. ``conftests``: names and files of those that count for it, the outermost first."""

    module: str
    file: str
    qualname: str
    conftests: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class CoveragePlan:
    """How ranks record the lines that run. ``options``: of ``Coverage``; ``contexts``: each test is one."""

    options: dict[str, Any]
    contexts: bool


@dataclass(frozen=True)
class Beginning:
    """What a new set of ranks is told. ``board``, ``log``: files that all ranks and pytest's process share.

    ``colored``: whether pytest's terminal shows colours.
    """

    directory: str  # where pytest was started
    rootdir: str
    ini: str | None
    options: dict[str, Any]
    plugins: tuple[str, ...]  # that explain comparisons
    board: str
    log: str
    size: int
    coverage: CoveragePlan | None
    colored: bool


@dataclass(frozen=True)
class Surroundings:
    """What differs in pytest's process since these ranks began. None: a variable is gone; nothing has changed."""

    variables: dict[str, str | None]
    directory: str | None
    path: tuple[str, ...] | None


@dataclass(frozen=True)
class RankTest:
    """One test, as a rank gets it. ``twins``: fixtures that are made there; ``state``: of the instance of its class."""

    number: int
    nodeid: str
    name: str
    definition: Definition
    state: dict[str, Any] | None
    values: dict[str, Any]
    twins: tuple[str, ...]
    surroundings: Surroundings
    marks: tuple[Any, ...]
    param: Any


def light(test: RankTest) -> RankTest | bytes:
    """Returns a test as it travels: pickled by name where nothing in it needs more, in a fifth of the time."""
    plain = test.state is None and test.param is None and not test.marks
    if plain and payload.PLAIN.issuperset(map(type, test.values.values())):
        return pickle.dumps(test, pickle.HIGHEST_PROTOCOL)
    return test


@dataclass(frozen=True)
class Verdict:
    """How one rank has found a test. ``outcome``: passed, failed, skipped, xfailed or exit.

    ``at``: by the machine's monotonic clock; ``error``: the exception, pickled; ``crash``: file and line;
    ``left``: what the test has left behind; ``resident``: MiB; ``entered``: how many operations, in each group.
    """

    outcome: str
    at: float = 0.0
    reason: str = ""
    longrepr: Any = None
    error: bytes | None = None
    crash: tuple[str, int] | None = None
    properties: tuple[tuple[str, object], ...] = ()
    warnings: tuple[tuple[str, str, str, int], ...] = ()  # class, text, file, line
    logged: str = ""
    left: tuple[str, ...] = ()
    resident: int = 0
    entered: Numbers = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """How all ranks have found a test. ``told``: what the launcher says of a call that did not end well."""

    size: int
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    told: str = ""
    apart: bool = False  # the call was ended since one rank had failed, and others were not done
    stacks: Mapping[int, str] = field(default_factory=dict)
