"""The file of ``profile=``: checked before ranks start, and merged event by event from the ranks' own traces.

Several ranks write the same process numbers and flow numbers (device 0 of each is "process" 0), and times that count
from a moment which each part names. Here each rank has numbers of its own, and all times count from the moment of the
call. No trace is ever in memory as a whole: traces of real steps have hundreds of megabytes.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from json import JSONDecoder
from typing import IO, TYPE_CHECKING, Any, cast

from mlaunch.base import own_files
from mlaunch.base.exceptions import misuse
from mlaunch.base.text import name_ranks
from mlaunch.caller import interrupts
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.report.launch_report import LaunchReport, RankReport
from mlaunch.core.parts import CallerPart, Spell, Tell
from mlaunch.profile.wire import ProfileOrder, TracePart
from mlaunch.protocol.spec import LaunchSpec

if TYPE_CHECKING:
    from mlaunch.caller.launch.settle import Ended

_EVENTS, _BASE = "traceEvents", "baseTimeNanoseconds"
_READ = 1 << 20  # characters
_PROCESSES = 1000  # numbers for each rank: its own, and those of devices, which the profiler calls processes, too
_FLOWS = frozenset("stfbenSTpF")  # kinds of events that are connected to others by an ID
_LEVEL = 5  # of compression
_decoder = JSONDecoder(strict=False)  # names of kernels may contain any character
_LONGEST = 16 * _READ  # characters of a value; longer text is not JSON


class CallTrace(CallerPart):
    """The trace of a call's last attempt. OSError if its file cannot be written.

    ``spell``: how the options were given.
    """

    def __init__(self, options: Options, spell: Spell) -> None:
        path = os.path.abspath(os.fspath(cast("str", options.profile)))
        self._path, self._spell = path, spell
        self._named = spell("profile", path)
        ranks = None if options.profile_ranks is None else tuple(options.profile_ranks)
        first, last = options.profile_steps
        self.section: ProfileOrder = ProfileOrder(_directory_beside(path, self._named), first, last, ranks)
        self._begun = set[int]()  # ranks of other machines of which this attempt has pieces

    def close(self) -> None:
        own_files.remove_directory(self.section.directory)

    def planned(self, spec: LaunchSpec) -> None:
        """Raise ValueError if the option names ranks that the launch does not have."""
        self._begun.clear()
        ranks, order = spec.world_size, self.section
        if order.ranks is not None and max(order.ranks) >= ranks and not spec.nodes.guessed:
            wanted = self._spell("profile_ranks", order.ranks)
            raise ValueError(f"{wanted}: allowed: ranks of this launch, 0 to {ranks - 1}")

    def heard(self, news: object) -> None:
        """Append a piece to the part of a rank on another machine, as long as there is room."""
        if not isinstance(news, TracePart):
            return
        path = f"{self.section.part_of(news.rank)}.gz"
        with contextlib.suppress(OSError):  # a part that is cut is reported later
            begun, flags = news.rank in self._begun, os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._begun.add(news.rank)
            with own_files.this_users_directory(os.path.dirname(path)) as there:
                fd = own_files.open_file(os.path.basename(path), flags | (0 if begun else os.O_TRUNC), dir_fd=there)
            with open(fd, "wb") as file:
                file.write(news.data)

    def settled(self, ended: Ended, tell: Tell) -> None:
        """Write the file, unless the call was interrupted. ``tell``: receives what is wrong with it."""
        if isinstance(ended.error, Exception | None):
            with interrupts.allowed():  # it may take long
                self._finish(ended.report(), tell)

    def _finish(self, report: LaunchReport, tell: Tell) -> None:
        order = self.section
        wanted = [rank.rank for rank in report.ranks if order.wants(rank.rank)]
        parts = {rank: path for rank in wanted if (path := order.written_by(rank))}
        if not parts:
            if any(order.has_begun(rank) for rank in wanted):
                tell(f"{self._named} is not written: it lacks {_why_missing(order, wanted)}")
            elif wanted:  # otherwise other machines have them
                tell(f"{self._named} is not written: no rank came to step {order.first} of {report.name}; steps are "
                     f"turns of mlaunch.progress, or calls of mlaunch.step()")  # fmt: skip
            return
        try:
            self._write(report, parts, tell)
        except OSError as error:
            tell(f"{self._named} is not written: {error.strerror or error}")
            return
        if missing := [rank for rank in wanted if rank not in parts]:
            tell(f"{self._named} lacks {_why_missing(order, missing)}")

    def _write(self, report: LaunchReport, parts: Mapping[int, str], tell: Tell) -> None:
        path, first = self._path, report.ranks[0].rank
        if first > 0:  # other machines of the launch have files of their own, and may share the file system
            path = _from_rank(path, first)
        with own_files.this_users_directory(os.path.dirname(next(iter(parts.values())))) as fd:
            there = {rank: f"/proc/self/fd/{fd}/{os.path.basename(part)}" for rank, part in parts.items()}
            whole = f"/proc/self/fd/{fd}/whole"
            lacks = write_trace(whole, report, there, compressed=path.endswith(".gz"))
            # Atomically: a reader never sees half of a file, and an earlier call's file stays until then.
            os.replace(whole, path)
        for rank, why in lacks.items():
            tell(f"{self._named} has only a part of rank {rank}'s trace: {why}")


def part(options: Options, spell: Spell) -> CallTrace:
    """Make the caller's part."""
    return CallTrace(options, spell)


def _directory_beside(path: str, named: str) -> str:
    """Make a directory for the parts. OSError if no file can be written at ``path``. ``named``: its name in errors."""
    try:
        if os.path.isdir(path):
            raise IsADirectoryError(21, "it is a directory")
        if os.path.exists(path) and not os.access(path, os.W_OK):
            raise PermissionError(13, "the file may not be written to")
        # Beside the file, not where temporary files are: that often is memory, and traces have hundreds of megabytes.
        return tempfile.mkdtemp(prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(path))
    except OSError as error:
        raise misuse(type(error)(error.errno, f"{named} cannot be written: {error.strerror}")) from None


def _from_rank(path: str, first: int) -> str:
    """Return the file name for a machine that is not the first: trace-from-rank-2.json.gz."""
    stem, end = (path[:-3], path[-3:]) if path.endswith(".gz") else (path, "")
    stem, kind = os.path.splitext(stem)
    return f"{stem}-from-rank-{first}{kind}{end}"


def _why_missing(order: ProfileOrder, ranks: Sequence[int]) -> str:
    """Return why parts are missing: "rank 0, which did not come to step 5; rank 1, which had begun to ..."."""
    ended = [rank for rank in ranks if order.has_begun(rank)]
    early = [rank for rank in ranks if rank not in ended]
    told = [f"{name_ranks(early)}, which did not come to step {order.first}"] if early else []
    told += (
        [f"{name_ranks(ended)}, which had begun to record, and ended or failed before it was written"] if ended else []
    )
    return "; ".join(told)


# The merged trace


class CutTraceError(ValueError):
    """The error that the text of a trace ends too early."""


class _Text:
    """The text of a file, which is read a part at a time."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._buffer, self._at = "", 0

    def next(self) -> str:
        """Return the next character that is not a space, and stay before it."""
        while True:
            while self._at < len(self._buffer) and self._buffer[self._at].isspace():
                self._at += 1
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            self._read()

    def skip(self, *characters: str) -> None:
        """Go past one of these characters."""
        if self.next() not in characters:
            raise CutTraceError(f"no {' or '.join(characters)} where there should be one")
        self._at += 1

    def value(self) -> Any:
        """Read a value, and at least one character after it: the beginning of a number looks like a number."""
        self.next()
        while True:
            try:
                found, end = _decoder.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError:
                end = len(self._buffer)
            if end < len(self._buffer):
                self._at = end
                return found
            self._read()

    def _read(self) -> None:
        try:
            more = self._file.read(_READ)
        except EOFError:  # a compressed file is cut
            more = ""
        if not more:
            raise CutTraceError("it ends too early")
        if len(self._buffer) - self._at > _LONGEST:
            raise CutTraceError("it holds what is no JSON")
        self._buffer, self._at = self._buffer[self._at :] + more, 0


def events_of(path: str) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a trace, with each event as a value of the name "traceEvents".

    Raises:
        CutTraceError: The trace ends too early.
    """
    open_it: Any = gzip.open if path.endswith(".gz") else open
    with open_it(path, "rt", encoding="utf-8", errors="replace") as file:
        text = _Text(file)
        text.skip("{")
        while text.next() != "}":
            name = text.value()
            text.skip(":")
            if name == _EVENTS:
                for event in _elements(text):
                    yield name, event
            else:
                yield name, text.value()
            if text.next() == ",":
                text.skip(",")


def _elements(text: _Text) -> Iterator[Any]:
    text.skip("[")
    while text.next() != "]":
        yield text.value()
        if text.next() == ",":
            text.skip(",")
    text.skip("]")


def write_trace(target: str, report: LaunchReport, parts: Mapping[int, str], *, compressed: bool) -> dict[int, str]:
    """Write the trace of a launch, with the parts of these ranks. Return, by rank, why a part is not complete in it."""
    lacks: dict[int, str] = {}
    open_it: Any = functools.partial(gzip.open, compresslevel=_LEVEL) if compressed else open
    with open_it(target, "wt", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit":"ms","{_BASE}":{round(report.begun * 1e9)},"{_EVENTS}":[\n')
        for number, event in enumerate(_events(report, parts, lacks)):
            file.write(f"{',' if number else ' '}{json.dumps(event, separators=(',', ':'))}\n")
        file.write("]}\n")
    return lacks


def _events(report: LaunchReport, parts: Mapping[int, str], lacks: dict[int, str]) -> Iterator[dict[str, Any]]:
    ranks = max(report.world_size, *(rank.rank + 1 for rank in report.ranks))  # ranks in other machines' files, too
    for rank in report.ranks:
        yield from _timeline(rank, report.name)
        try:
            if rank.rank in parts:
                yield from _renumbered(parts[rank.rank], _Numbers(rank, ranks), report.begun)
        except CutTraceError as error:
            lacks[rank.rank] = str(error)


def _timeline(rank: RankReport, name: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank that the launch itself knows."""
    pid = (rank.rank + 1) * _PROCESSES
    named = {"name": f"rank {rank.rank} (pid {rank.pid}, {rank.device}) of {name}"}
    yield {"name": "process_name", "ph": "M", "pid": pid, "args": named}
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
    yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": "mlaunch"}}
    yield {"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": -1}}
    if rank.host:  # the times are those of another machine's clock
        yield {"name": "process_labels", "ph": "M", "pid": pid, "args": {"labels": f"clock of {rank.host}"}}
    for span in rank.spans:
        yield {"name": span.phase, "ph": "X", "cat": "mlaunch", "pid": pid, "tid": 0, "ts": round(span.start * 1e6, 3),
               "dur": round((span.end - span.start) * 1e6, 3), "args": {"end": rank.end}}  # fmt: skip


class _Numbers:
    """The numbers of one rank's processes and flows, which no other rank has. ``ranks``: the number of ranks."""

    def __init__(self, rank: RankReport, ranks: int) -> None:
        self.rank, self._ranks = rank, ranks
        self._pids: dict[Any, int] = {rank.pid: (rank.rank + 1) * _PROCESSES}

    def of_process(self, pid: Any) -> int:
        """Return a process's number. The profiler's own events have a text there: they get the rank's number."""
        own = (self.rank.rank + 1) * _PROCESSES
        return own if isinstance(pid, str) else self._pids.setdefault(pid, own + len(self._pids))

    def of_flow(self, number: Any) -> Any:
        """Return a flow's number, if it is a number: readers take texts for hexadecimal numbers."""
        if isinstance(number, int):
            return number * self._ranks + self.rank.rank
        return f"{self.rank.rank}-{number}"

    def names_the_rank(self, event: Mapping[str, Any]) -> bool:
        """True if the event names the rank's process, which the timeline has done already."""
        kind = str(event.get("name"))
        own = (self.rank.rank + 1) * _PROCESSES
        return event.get("ph") == "M" and kind.startswith("process_") and self.of_process(event["pid"]) == own


def _renumbered(path: str, numbers: _Numbers, zero: float) -> Iterator[dict[str, Any]]:
    """Yield the events of a part. A process's name comes with its first event, as the profiler names unused devices."""
    base = 0.0
    names: dict[Any, list[dict[str, Any]]] = {}  # for processes without an event so far
    seen: set[Any] = set()
    for name, value in events_of(path):
        if name == _BASE:
            base = float(value) / 1e3
        elif name != _EVENTS or not isinstance(value, dict) or "pid" not in value or numbers.names_the_rank(value):
            continue
        elif value.get("ph") == "M" and value["pid"] not in seen:
            names.setdefault(value["pid"], []).append(value)
        else:
            seen.add(value["pid"])
            for event in (*names.pop(value["pid"], ()), value):
                yield _moved(event, numbers, base - zero * 1e6)


def _moved(event: Mapping[str, Any], numbers: _Numbers, shift: float) -> dict[str, Any]:
    """Return the event with the rank's numbers. ``shift``: microseconds to add to the part's times."""
    moved = {**event, "pid": numbers.of_process(event["pid"])}
    if event.get("ph") == "M":
        moved.pop("ts", None)
        if event.get("name") == "process_name":
            moved["args"] = {"name": f"rank {numbers.rank.rank}: {event.get('args', {}).get('name', '')}"}
        elif event.get("name") == "process_sort_index":
            moved["args"] = {"sort_index": moved["pid"]}
    elif isinstance(event.get("ts"), int | float):
        moved["ts"] = round(event["ts"] + shift, 3)
    if event.get("ph") in _FLOWS and "id" in event:
        moved["id"] = numbers.of_flow(event["id"])
    return moved
