"""The lease of machines: their caller gives signs of life, and machines that hear none leave.

The end of a stream tells of a caller that ends, and of most that are killed. It does not tell of one whose machine lost
its power or its network: no packet comes then, for hours if nobody asks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlaunch.engines.wire.member_messages import Lease

if TYPE_CHECKING:
    from mlaunch.engines.wire.member_streams import CallersStream

PARTS = 5  # signs in the time of a lease, at least
_LONGEST = 10.0  # seconds between two signs: they also tell of a machine that does not answer


def interval(lease: float) -> float:
    """Returns the seconds from one sign to the next."""
    return min(lease / PARTS, _LONGEST)


class Renewal:
    """The caller's side: a thread that sends what is due. The streams must outlive it."""

    def __init__(self, streams: Sequence[CallersStream], lease: Lease) -> None:
        self._streams = streams
        self._lease = lease
        self._closed = threading.Event()
        # A thread: between calls nobody in this process hears or tells the machines anything.
        self._thread = threading.Thread(target=self._run, name="mlaunch-lease", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            for stream in self._streams:
                if stream.unsent:  # else what is on its way is a sign, too
                    stream.flush()
                else:
                    stream.send(self._lease)
            if self._closed.wait(interval(self._lease.seconds)):
                return

    def close(self) -> None:
        """Ends the thread. May be called in a fork, which has no such thread."""
        self._closed.set()
        self._thread.join()
