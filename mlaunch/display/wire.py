"""How what a rank displays (a table, a figure) gets to the notebook that called: one line for each, in a pipe.

``<monotonic seconds> <JSON>``: what IPython's ``display_pub.publish`` takes, or ``{"clear": wait}``. A line begins with
a line feed, too: one that was interrupted spoils no other.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from typing import Any

STREAM = 3  # beside 1 and 2, the standard ones
LIMIT = 16 << 20  # bytes of one line


def line_of(content: Mapping[str, Any]) -> bytes | None:
    """Returns the line; None if it is more than may be sent."""
    line = f"\n{time.monotonic()} {json.dumps(content, default=_as_text)}\n".encode()
    return line if len(line) <= LIMIT else None


def _as_text(value: object) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else repr(value)


def read(line: bytes) -> tuple[float, dict[str, Any]] | None:
    """Returns when a line was written, and its content; None if it is no whole one."""
    at, _, content = line.partition(b" ")
    try:
        found = json.loads(content)
        return (float(at), found) if isinstance(found, dict) else None
    except ValueError:
        return None


def _time_of(line: bytes, now: float) -> float:
    """Return when a line was written, as it says; ``now`` if it does not."""
    try:
        return float(line.partition(b" ")[0])
    except ValueError:
        return now


class LineCutter:
    """Cuts what is read into lines, of which it holds no more than one, up to the limit."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes, now: float) -> list[tuple[float, bytes]]:
        """Return the lines that this completes, each with when it was written."""
        *lines, rest = data.split(b"\n")
        whole = []
        for line in lines:
            self._add(line)
            whole.append(bytes(self._rest))
            self._rest.clear()
        self._add(rest)
        return [(_time_of(line, now), line) for line in whole if line]

    def _add(self, data: bytes) -> None:
        if len(self._rest) + len(data) <= LIMIT:  # what is longer is no line of ours, and loses its end
            self._rest += data
