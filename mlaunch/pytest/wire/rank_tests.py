"""Records between pytest's process and the ranks of a test."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlaunch.protocol import payload


@dataclass(frozen=True)
class Definition:
    """Where a test is defined. ``conftests``: names and files of those that count for it, the outermost first."""

    module: str
    file: str
    qualname: str
    conftests: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class CoveragePlan:
    """How ranks record the lines that run. ``options``: of ``Coverage``; ``contexts``: True if each test is one."""

    options: dict[str, Any]
    contexts: bool


@dataclass(frozen=True)
class Beginning:
    """The first message to a new set of ranks. ``board``, ``log``: files that all ranks and pytest's process share.

    ``colored``: True if pytest's terminal shows colours.
    """

    directory: str  # where pytest was started
    rootdir: str
    ini: str | None
    options: dict[str, Any]
    flags: dict[str, str]  # of installed plugins, too: the names of their options
    settings: dict[str, Any]  # of the configuration file, of installed plugins, too
    plugins: tuple[str, ...]  # that explain comparisons
    board: str
    log: str
    size: int
    coverage: CoveragePlan | None
    colored: bool


@dataclass(frozen=True)
class Surroundings:
    """Changes in pytest's process since these ranks began. None: a variable is gone; the rest is unchanged."""

    variables: dict[str, str | None]
    directory: str | None
    path: tuple[str, ...] | None


@dataclass(frozen=True)
class RequestFacts:
    """The ``request`` of a test or fixture on ranks. ``param``: none or one value; ``marks``: of the node."""

    scope: str
    fixturename: str | None
    fixturenames: tuple[str, ...]
    node: str
    nodeid: str
    originalname: str | None
    path: str
    keywords: tuple[str, ...]
    marks: tuple[Any, ...]
    param: tuple[Any, ...] = ()
    params: dict[str, Any] | None = None  # of the test


@dataclass(frozen=True)
class ClassChanges:
    """Attributes that pytest's process has set on a test's class, or removed, since these ranks last got them.

    ``told``: the errors to raise for values that cannot be sent, once a rank asks for them.
    """

    given: dict[str, Any] = field(default_factory=dict)
    gone: tuple[str, ...] = ()
    told: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FixtureStep:
    """The setup or teardown of a fixture on ranks. ``function``: by file, name, and which of these.

    ``owner``: the class of its ``self``; ``test``: whose instance that is, "" for one of its own.
    """

    number: int
    name: str
    function: tuple[str, str, int]
    ends: bool
    values: dict[str, Any] = field(default_factory=dict)
    twins: tuple[str, ...] = ()
    owner: str = ""
    test: str = ""


@dataclass(frozen=True)
class Examples:
    """How the ranks of a test with hypothesis draw the same examples. ``settings``: pickled."""

    seed: int | str
    settings: bytes | None


@dataclass(frozen=True)
class RankTest:
    """A test as a rank gets it, or a step for one of its fixtures.

    ``state``: of the instance of its class; ``twins``: fixtures that are made there; ``rewritten``: modules whose
    assertions explain themselves.
    """

    number: int
    nodeid: str
    name: str
    definition: Definition
    surroundings: Surroundings
    state: dict[str, Any] | None = None
    values: dict[str, Any] = field(default_factory=dict)
    twins: tuple[str, ...] = ()
    marks: tuple[Any, ...] = ()
    request: RequestFacts | None = None
    changes: ClassChanges | None = None
    step: FixtureStep | None = None
    examples: Examples | None = None
    rewritten: tuple[str, ...] = ()


def light(test: RankTest) -> RankTest | bytes:
    """Return a test as it is sent: pickled by name if nothing in it needs more, in a fifth of the time."""
    plain = test.state is None and test.request is None and test.step is None and not test.marks
    if plain and payload.PLAIN.issuperset(map(type, test.values.values())):
        return pickle.dumps(test, pickle.HIGHEST_PROTOCOL)
    return test


@dataclass(frozen=True)
class Verdict:
    """The outcome of a test on one rank. ``outcome``: passed, failed, skipped, xfailed or exit.

    ``at``: by the machine's monotonic clock; ``error``: the exception, pickled; ``crash``: file and line;
    ``places``: those of the exception's frames that are in the user's files, the innermost first;
    ``left``: what the test has left behind; ``resident``: MiB; ``entered``: how many operations, in each group.
    """

    outcome: str
    at: float = 0.0
    reason: str = ""
    longrepr: Any = None
    error: bytes | None = None
    crash: tuple[str, int] | None = None
    places: tuple[tuple[str, int], ...] = ()
    properties: tuple[tuple[str, object], ...] = ()
    marks: tuple[Any, ...] = ()  # that the test has added
    warnings: tuple[tuple[str, bytes | None, str, int], ...] = ()  # text, the warning pickled, file, line
    logged: str = ""
    left: tuple[str, ...] = ()
    resident: int = 0
    entered: Mapping[str, tuple[tuple[int, ...], int | None]] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    shown: str = ""  # written while capturing was disabled


@dataclass(frozen=True)
class Part:
    """The outcome of a part of a test on one rank. ``values``: as shown; ``verdict``: None if it has passed."""

    message: str | None
    values: dict[str, str]
    verdict: Verdict | None


@dataclass(frozen=True)
class Findings:
    """The outcome of a test on all ranks.

    ``told``: the launcher's report of a call that did not end well; ``failure``: the same for programs.
    """

    size: int
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    told: str = ""
    failure: Mapping[str, Any] = field(default_factory=dict)
    apart: bool = False  # the call was ended because one rank had failed while others were not done
    stacks: Mapping[int, str] = field(default_factory=dict)
