"""The events of one call, and where they go: made of what the agents of its attempts say, and of how the attempts end.

A sink that fails does not end a launch: a warning says so, and it gets no more.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mlaunch._version import SCHEMA
from mlaunch.base.log import log
from mlaunch.base.misuse import as_dict, misuse
from mlaunch.caller.launch.settle import Ended
from mlaunch.core.notes import Noticed
from mlaunch.core.parts import CallerPart, Spell
from mlaunch.protocol.messages import RankGone, RanksStarting, RankStarted
from mlaunch.protocol.spec import LaunchSpec

if TYPE_CHECKING:
    from mlaunch.caller.options.launch_options import Options

_OTEL = "otel"


class EventSink:
    """What takes the events of one call."""

    def __init__(self, asked: str = "events=") -> None:
        self._asked, self._broken = asked, False

    def take(self, event: Mapping[str, Any]) -> None:
        if self._broken:
            return
        try:
            self._take(event)
        except Exception as error:  # whatever a user's callable may raise
            self._broken = True
            words = "%s: %s: %s. The launch continues, and its later events are dropped"
            log.warning(words, self._asked, type(error).__name__, error)

    def close(self) -> None:
        """Give up what it holds."""

    def _take(self, event: Mapping[str, Any]) -> None:
        raise NotImplementedError


class CallableSink(EventSink):
    """A function that is called with each event."""

    def __init__(self, function: Callable[[dict[str, Any]], object]) -> None:
        super().__init__()
        self._function = function

    def _take(self, event: Mapping[str, Any]) -> None:
        self._function(dict(event))


class FileSink(EventSink):
    """A file that gets a line of JSON for each event. Several launches may share it: each line is one write."""

    def __init__(self, path: str | os.PathLike[str], spell: Spell) -> None:
        super().__init__(spell("events", os.fspath(path)))
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            lacks = f"{self._asked} cannot be opened ({error.strerror})"
            need = "give the path of a file that this process may write, in a directory that is there"
            raise OSError(error.errno, f"{lacks}; {need}") from None

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _take(self, event: Mapping[str, Any]) -> None:
        line = f"{json.dumps(event)}\n".encode()
        while line:  # a full disk takes a part, and says so at the rest
            line = line[os.write(self._fd, line) :]


class CallEvents(CallerPart):
    """The events of one call, for a sink. OSError if its file cannot be opened."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._function, self._launch, self._restart_count = "", "", 0
        self._hosts: dict[int, str] = {}  # by rank

    def planned(self, spec: LaunchSpec) -> None:
        """Note which attempt begins, and tell that it is another one."""
        self._function, self._restart_count = spec.call.name, spec.restarts.count
        if spec.restarts.count:
            self._tell("restart")
        self._launch = ""

    def noticed(self, word: object) -> None:
        """Tell of a word, if it is an event."""
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
