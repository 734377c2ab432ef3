"""Heartbeats of a caller to its machines: those that receive none leave.

When a caller ends, or is killed, its streams end. If its machine loses power or its network, they do not: no packet
comes then, for hours unless somebody sends one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from mlaunch.engines.wire.member_messages import CallersStream, Heartbeat

BEATS = 5  # heartbeats in the time after which a machine leaves, at least
_LONGEST = 10.0  # seconds between two: they also show that a machine does not answer


def interval(heartbeat_timeout: float) -> float:
    """Return the seconds from one heartbeat to the next."""
    return min(heartbeat_timeout / BEATS, _LONGEST)


class Heartbeats:
    """A thread of the caller that sends heartbeats. The streams must outlive it."""

    def __init__(self, streams: Sequence[CallersStream], heartbeat: Heartbeat) -> None:
        self._streams = streams
        self._heartbeat = heartbeat
        self._closed = threading.Event()
        # A thread: between calls nobody in this process reads from the machines, or writes to them.
        self._thread = threading.Thread(target=self._run, name="mlaunch-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            for stream in self._streams:
                if stream.unsent:  # otherwise data on its way shows that the caller lives
                    stream.flush()
                else:
                    stream.send(self._heartbeat)
            if self._closed.wait(interval(self._heartbeat.timeout)):
                return

    def close(self) -> None:
        """End the thread. May also be called in a fork, which has no such thread."""
        self._closed.set()
        self._thread.join()
