"""The events of one call, made from its agents' reports, and from the ends of its attempts."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from mlaunch._version import SCHEMA
from mlaunch.base.exceptions import as_dict, misuse
from mlaunch.caller.launch.settle import Ended
from mlaunch.core.parts import CallerPart, Spell
from mlaunch.core.records import Noticed
from mlaunch.events.caller.sinks import CallableSink, EventSink, FileSink
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
    wanted = options.events
    if wanted == _OTEL:
        try:
            from mlaunch.events.caller.spans import SpanSink
        except ModuleNotFoundError as error:
            what = f"{spell('events', wanted)} needs the package opentelemetry-api: pip install 'mlaunch[otel]'"
            raise misuse(ModuleNotFoundError(what, name=error.name)) from None
        return CallEvents(SpanSink())
    if callable(wanted):
        return CallEvents(CallableSink(wanted))
    return CallEvents(FileSink(wanted or "", spell))
