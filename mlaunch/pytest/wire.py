"""Records and shared memory between pytest's process and the ranks of a test."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlaunch.base.fds import fix_size, memory_file
from mlaunch.protocol import payload, this_rank


@dataclass(frozen=True)
class Definition:
    """The file and name of a test. ``conftests``: names and files of those that count for it, the outermost first."""

    module: str
    file: str
    qualname: str
    conftests: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class CoveragePlan:
    """The plan for recording the lines that run on ranks.

    ``options``: of ``Coverage``; ``contexts``: True if each test is a context.
    """

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
    """The seed and settings with which all ranks of a test draw the same examples. ``settings``: pickled."""

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


def packed(test: RankTest) -> RankTest | bytes:
    """Return a test as it is sent. If all in it is plain, that is a plain pickle, which takes a fifth of the time."""
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


_PATIENCE = 0.02  # seconds for the others to begin to run, after one has not passed
_MOST_PATIENCE = 2.0  # for ranks that run, as the machine may be busy
_PAUSE = 0.001
# The number of the test that the rank has left last, its pid, how many parts it has left (the test's number is in the
# upper half), and its last two failures in parts, each with its outcome: a rank may continue before others have looked.
_CELL = struct.Struct("=qqqqqqq")
_READS = 3  # one may come in the middle of a write
_PARTS = 2**32
_LENGTH = struct.Struct("=q")


class RankBarrier:
    """Shared memory in which the ranks of a test see who is done. Not a collective: some may wait in one.

    The board holds, for each rank, the number of the test whose function it has left last; the log holds verdicts.
    """

    def __init__(self, beginning: Beginning) -> None:
        self._size = beginning.size
        here = this_rank.this_rank
        self._rank = 0 if here is None else here.rank
        fd = os.open(beginning.board, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._board = mmap.mmap(fd, _CELL.size * self._size)
        finally:
            os.close(fd)
        # O_APPEND: the kernel puts each write at the end, so verdicts of several ranks do not overwrite each other.
        self._log = os.open(beginning.log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._part, self._failures = 0, (0, 0, 0, 0)
        self.leave(0)

    def leave(self, number: int) -> None:
        """Note that this rank has left the test's function."""
        # In shared memory, since a rank may leave its test while no thread of it can send anything.
        self._left = number
        self._write()

    def _write(self) -> None:
        _CELL.pack_into(self._board, _CELL.size * self._rank, self._left, os.getpid(), self._part, *self._failures)

    def leave_part(self, number: int, part: int, outcome: int = 0) -> None:
        """Note that this rank has left a part of a test. ``outcome``: 0, or a number for this kind of failure."""
        self._part = number * _PARTS + part
        if outcome:
            self._failures = (*self._failures[2:], self._part, outcome)
        self._write()

    def all_left_part(self, number: int, part: int) -> bool:
        """True if all ranks have left a part, or leave it soon."""
        wanted = number * _PARTS + part
        return self._wait(lambda left, at: left < number and at < wanted)

    def all_failed(self, number: int, part: int, outcome: int) -> bool:
        """True if all ranks have left exactly this part with this outcome, or do so soon."""
        wanted = number * _PARTS + part, outcome
        if not self.all_left_part(number, part):
            return False
        return any(all(wanted in (at[3:5], at[5:]) for at in self._cells()) for _ in range(_READS))

    def finish(self, number: int, verdict: Verdict) -> bool:
        """True if the test has passed here, or all ranks have left it, too; else write the verdict to the log."""
        if verdict.outcome == "passed" or self._wait(lambda left, _: left < number):
            return True
        write_verdict(self._log, self._rank, verdict)
        return False

    def _cells(self) -> Iterator[tuple[int, ...]]:
        return _CELL.iter_unpack(self._board[:])

    def _wait(self, is_missing: Callable[[int, int], bool]) -> bool:
        begun = ran = time.monotonic()
        while missing := [pid for left, pid, at, *_ in self._cells() if is_missing(left, at)]:
            # A rank that runs may come to its end; one that sleeps for 20 ms waits for this one in a collective.
            now = time.monotonic()
            ran = now if any(map(_runs, missing)) else ran
            if now - begun > _MOST_PATIENCE or now - ran > _PATIENCE:
                return False
            time.sleep(_PAUSE)
        return True


def _runs(pid: int) -> bool:
    """True if a thread of a process runs, or would if a core were free: autograd has threads of its own."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] == b"R":
                    return True
    return False


def new_barrier_files(size: int) -> tuple[int, int]:
    """Make the board and the log of a RankBarrier, in memory; return their descriptors."""
    board = memory_file("board")
    os.ftruncate(board, _CELL.size * size)
    fix_size(board)
    return board, os.memfd_create("mlaunch-log", os.MFD_CLOEXEC)


def write_verdict(log: int, rank: int, verdict: Verdict) -> None:
    """Append a verdict to the log, in one piece."""
    data = pickle.dumps((rank, verdict))
    os.write(log, _LENGTH.pack(len(data)) + data)


def take_verdicts(log: int) -> dict[int, Verdict]:
    """Return the verdicts in the log, by rank, and empty it."""
    data, found = os.pread(log, os.fstat(log).st_size, 0), {}
    os.ftruncate(log, 0)
    while data:
        (length,) = _LENGTH.unpack_from(data)
        rank, verdict = pickle.loads(data[_LENGTH.size : _LENGTH.size + length])
        found[rank] = verdict
        data = data[_LENGTH.size + length :]
    return found
