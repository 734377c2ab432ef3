"""The sinks of events: a function, or a file. A sink that fails does not end a launch: it warns, and gets no more."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from mlaunch.base.log import log
from mlaunch.core.parts import Spell


class EventSink:
    """The sink of one call's events."""

    def __init__(self, asked: str = "events=") -> None:
        self._asked, self._broken = asked, False

    def take(self, event: Mapping[str, Any]) -> None:
        if self._broken:
            return
        try:
            self._take(event)
        except Exception as error:  # a user's callable may raise anything
            self._broken = True
            words = "%s: %s: %s. The launch continues, and its later events are dropped"
            log.warning(words, self._asked, type(error).__name__, error)

    def close(self) -> None:
        """Release the sink's resources."""

    def _take(self, event: Mapping[str, Any]) -> None:
        raise NotImplementedError


class CallableSink(EventSink):
    """A sink that calls a function with each event."""

    def __init__(self, function: Callable[[dict[str, Any]], object]) -> None:
        super().__init__()
        self._function = function

    def _take(self, event: Mapping[str, Any]) -> None:
        self._function(dict(event))


class FileSink(EventSink):
    """A sink that writes a line of JSON for each event to a file. Launches may share it: each line is one write."""

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
        while line:  # a full disk takes a part of it; the next write fails
            line = line[os.write(self._fd, line) :]
