"""The format of displays (a table, a figure) on their way to the notebook: a line for each, in a pipe.

``<monotonic seconds> <JSON>``: arguments of IPython's ``display_pub.publish``, or ``{"clear": wait}``. A line begins
with a line feed, too, so that an interrupted one does not spoil the next.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from typing import Any

STREAM = 3  # after 1 and 2, the standard ones
LIMIT = 16 << 20  # bytes of one line


def line_of(content: Mapping[str, Any]) -> bytes | None:
    """Return the line; None if it is too long."""
    line = f"\n{time.monotonic()} {json.dumps(content, default=_as_text)}\n".encode()
    return line if len(line) <= LIMIT else None


def _as_text(value: object) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else repr(value)


def read(line: bytes) -> tuple[float, dict[str, Any]] | None:
    """Return the time at which a line was written, and its content; None if it is incomplete."""
    at, _, content = line.partition(b" ")
    try:
        found = json.loads(content)
        return (float(at), found) if isinstance(found, dict) else None
    except ValueError:
        return None


def _time_of(line: bytes, now: float) -> float:
    """Return the time at which a line was written; ``now`` if it has none."""
    try:
        return float(line.partition(b" ")[0])
    except ValueError:
        return now


class LineCutter:
    """A buffer that cuts a stream into lines; it holds at most one, up to the limit."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes, now: float) -> list[tuple[float, bytes]]:
        """Return the lines that this completes, each with its time of writing."""
        *lines, rest = data.split(b"\n")
        whole = []
        for line in lines:
            self._add(line)
            whole.append(bytes(self._rest))
            self._rest.clear()
        self._add(rest)
        return [(_time_of(line, now), line) for line in whole if line]

    def _add(self, data: bytes) -> None:
        if len(self._rest) + len(data) <= LIMIT:  # a longer line is not ours, and loses its end
            self._rest += data
