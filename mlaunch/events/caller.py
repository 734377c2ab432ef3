"""The events of one call, made from its agents' reports and the ends of its attempts, and their sinks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mlaunch._version import SCHEMA
from mlaunch.base.exceptions import as_dict, misuse
from mlaunch.base.log import log
from mlaunch.caller.launch.settle import Ended
from mlaunch.core.parts import CallerPart, Spell
from mlaunch.core.records import Noticed
from mlaunch.protocol.messages import RankGone, RanksStarting, RankStarted
from mlaunch.protocol.spec import LaunchSpec

if TYPE_CHECKING:
    from mlaunch.caller.options.launch_options import Options

_OTEL = "otel"


class CallEvents(CallerPart):
    """The events of one call, for a sink. OSError if its file cannot be opened."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._function, self._launch, self._restart_count = "", "", 0
        self._hosts: dict[int, str] = {}  # by rank

    def planned(self, spec: LaunchSpec) -> None:
        """Note which attempt begins, and send an event if it is a restart."""
        self._function, self._restart_count = spec.call.name, spec.restarts.count
        if spec.restarts.count:
            self._tell("restart")
        self._launch = ""

    def noticed(self, word: object) -> None:
        """Send the event of a record, if it has one."""
        if isinstance(word, RanksStarting):
            self._launch = word.launch_id
            self._tell("launch", world_size=word.world_size)
        elif isinstance(word, RankStarted):
            self._hosts[word.rank] = word.host or os.uname().nodename
            self._tell_rank(word, "started", None)
        elif isinstance(word, RankGone):
            self._tell_rank(word, "ended", word.exitcode)
        elif isinstance(word, Noticed):
            self._tell(word.kind, **{"text": word.what, **word.facts})
        elif isinstance(word, Ended):
            self._tell_end(word)

    def _tell_rank(self, word: RankStarted | RankGone, state: str, exitcode: int | None) -> None:
        host = self._hosts.get(word.rank, "")
        self._tell("rank", rank=word.rank, host=host, pid=word.pid, state=state, exitcode=exitcode)

    def _tell_end(self, ended: Ended) -> None:
        report = ended.report()
        if report.stopped is not None:
            stopped = report.stopped
            self._tell("stop", reason=stopped.reason, asked=stopped.asked, step=stopped.step)
        if ended.error is not None:
            self._tell("failure", failure=as_dict(ended.error))
        self._tell("end", ok=ended.error is None, seconds=report.seconds)

    def close(self) -> None:
        self._sink.close()

    def _tell(self, kind: str, **facts: Any) -> None:
        known = {"launch": self._launch, "function": self._function, "restart_count": self._restart_count}
        self._sink.take({"schema": SCHEMA, "event": kind, "at": time.time(), **known, **facts})


def part(options: Options, spell: Spell) -> CallEvents:
    """Make the caller's part."""
    wanted = options.events
    if wanted == _OTEL:
        try:
            spans = EventSpans()
        except ModuleNotFoundError as error:
            what = f"{spell('events', wanted)} needs the package opentelemetry-api: pip install 'mlaunch[otel]'"
            raise misuse(ModuleNotFoundError(what, name=error.name)) from None
        return CallEvents(EventSink(spans.take, spans.close))
    if callable(wanted):
        return CallEvents(EventSink(wanted))
    asked = spell("events", os.fspath(wanted or ""))
    file = EventFile(wanted or "", asked)
    return CallEvents(EventSink(file.take, file.close, asked))


class EventSink:
    """The sink of one call's events: a function, a file or OpenTelemetry. One that fails warns, and gets no more.

    ``take``: gets each event; ``close``: releases what it uses; ``asked``: the option, for the warning.
    """

    def __init__(
        self,
        take: Callable[[dict[str, Any]], object],
        close: Callable[[], None] = lambda: None,
        asked: str = "events=",
    ) -> None:
        self._take, self.close = take, close
        self._asked, self._broken = asked, False

    def take(self, event: dict[str, Any]) -> None:
        if self._broken:
            return
        try:
            self._take(event)
        except Exception as error:  # a user's callable may raise anything
            self._broken = True
            words = "%s: %s: %s. The launch continues, and its later events are dropped"
            log.warning(words, self._asked, type(error).__name__, error)


class EventFile:
    """A file that gets a line of JSON for each event. Launches may share it: each line is one write."""

    def __init__(self, path: str | os.PathLike[str], asked: str) -> None:
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            lacks = f"{asked} cannot be opened ({error.strerror})"
            need = "give the path of a file that this process may write, in a directory that exists"
            raise misuse(OSError(error.errno, f"{lacks}; {need}")) from None

    def take(self, event: Mapping[str, Any]) -> None:
        line = f"{json.dumps(event)}\n".encode()
        while line:  # a full disk takes a part of it; the next write fails
            line = line[os.write(self._fd, line) :]

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class EventSpans:
    """Events as spans of OpenTelemetry, through its API: they go nowhere unless its SDK is set up.

    There is a span for each attempt, as a child of the caller's current one, with events in it. ModuleNotFoundError
    without the API.
    """

    def __init__(self) -> None:
        import opentelemetry.trace  # an extra

        self._trace = opentelemetry.trace
        self._span: opentelemetry.trace.Span | None = None

    def close(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.end()

    def take(self, event: Mapping[str, Any]) -> None:
        if self._span is None:
            self._span = self._trace.get_tracer("mlaunch").start_span(f"mlaunch {event['function']}")
        if event["event"] == "end":
            self.close()
            return
        facts = {name: value for name, value in event.items() if isinstance(value, bool | int | float | str)}
        if event["event"] == "failure":
            failure = event["failure"]
            facts |= {name: failure[name] for name in ("kind", "rank", "host", "text") if failure[name] is not None}
            status = self._trace.Status(self._trace.StatusCode.ERROR, failure["text"].partition("\n")[0])
            self._span.set_status(status)
        attributes = {f"mlaunch.{name}": value for name, value in facts.items() if name not in {"schema", "at"}}
        self._span.add_event(event["event"], attributes, timestamp=int(event["at"] * 1e9))
