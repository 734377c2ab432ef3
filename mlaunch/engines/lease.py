"""The lease of machines: their caller gives signs of life, and machines that hear none leave.

The end of a stream tells of a caller that ends, and of most that are killed. It does not tell of one whose machine lost
its power or its network: no packet comes then, for hours if nobody asks.
"""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from mlaunch.base import linux
from mlaunch.protocol.machines.frame_stream import FrameStream
from mlaunch.protocol.messages.member_messages import Lease

_PARTS = 5  # signs in the time of a lease
_FAREWELLS, _FAREWELL_DELAY = 60, 5.0  # how often they are given back, and seconds between; a controller may be away
_OTHERS_DELAY = 1.0  # seconds for the other machines to say why they leave, too, before all are given back


class Renewal:
    """The caller's side: a thread that sends what is due. The streams must outlive it."""

    def __init__(self, streams: Sequence[FrameStream], lease: Lease) -> None:
        self._streams = streams
        self._lease = lease
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlaunch-lease", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            for stream in self._streams:
                if stream.unsent:  # else what is on its way is a sign, too
                    stream.flush()
                else:
                    stream.send(self._lease)
            if self._closed.wait(self._lease.seconds / _PARTS):
                return

    def close(self) -> None:
        """Ends it. May be called in a fork, which has no such thread."""
        self._closed.set()
        self._thread.join()


class Term:
    """A machine's side. ``lease``: as it was told last; None: it has not been told, and stays."""

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream
        self._told = False
        self.lease: Lease | None = None

    @property
    def left(self) -> float:
        """Returns the seconds until it is over, unless something comes."""
        return math.inf if self.lease is None else self._stream.heard_at + self.lease.seconds - time.monotonic()

    @property
    def over(self) -> bool:
        """Whether nothing has come in time, not even what this process was too busy to read."""
        return self.left <= 0 and not linux.wait_readable([self._stream.incoming], 0.0)

    def milliseconds(self) -> float | None:
        """Returns how long a poll may take; None: for ever."""
        return None if self.lease is None else 1000 * max(0.0, self.left)

    def tell(self) -> None:
        """Says why this machine leaves; once."""
        if self.lease is None or self._told:
            return
        self._told = True
        text = f"mlaunch: nothing has come from the caller for {self.lease.seconds:g} s, so this machine leaves"
        print(text, file=sys.stderr, flush=True)

    def leave(self) -> None:
        """Says why, and gives the machines back. Called once nothing of the launch is left here."""
        self.tell()
        if self.lease is not None and self.lease.farewell:
            time.sleep(_OTHERS_DELAY)
            for _ in range(_FAREWELLS):
                done = subprocess.run(self.lease.farewell, check=False, stdin=subprocess.DEVNULL, stdout=sys.stderr)
                if done.returncode == 0:
                    return
                time.sleep(_FAREWELL_DELAY)
