"""A machine's side of the heartbeat: a machine that receives nothing from its caller in time leaves.

The caller's side, and why one is needed, is in ``mlaunch/engines/caller/launch/timeouts.py``.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from mlaunch.base import linux
from mlaunch.engines.wire.member_messages import Heartbeat

if TYPE_CHECKING:
    from mlaunch.engines.wire.member_streams import MembersStream

_FAREWELL_TIMEOUT = 60.0  # seconds for the command that gives the machines back
_FAREWELLS, _FAREWELL_DELAY = 60, 5.0  # attempts to give them back, and seconds between; a controller may be down
_OTHERS_DELAY = 1.0  # seconds for the other machines to say why they leave, before all are given back


class CallersHeartbeat:
    """The heartbeat of the caller. ``last``: the last one received; None: none yet, and the machine stays."""

    def __init__(self, stream: MembersStream) -> None:
        self._stream = stream
        self._told = False
        self.last: Heartbeat | None = None

    @property
    def left(self) -> float:
        """The seconds until the caller counts as lost, if nothing comes before."""
        return math.inf if self.last is None else self._stream.heard_at + self.last.timeout - time.monotonic()

    @property
    def over(self) -> bool:
        """True if nothing has come in time, not even data that this process was too busy to read."""
        return self.left <= 0 and not linux.wait_readable([self._stream.incoming], 0.0)

    def milliseconds(self) -> float | None:
        """Return how many milliseconds a poll may take; None: no limit."""
        return None if self.last is None else 1000 * max(0.0, self.left)

    def tell(self) -> None:
        """Print why this machine leaves, once."""
        if self.last is None or self._told:
            return
        self._told = True
        text = f"mlaunch: nothing has come from the caller for {self.last.timeout:g} s, so this machine leaves"
        print(text, file=sys.stderr, flush=True)

    def leave(self) -> None:
        """Print why this machine leaves, and give the machines back. Call it when no process of the launch is left."""
        self.tell()
        if self.last is not None and self.last.farewell:
            time.sleep(_OTHERS_DELAY)
            for _ in range(_FAREWELLS):
                # By this process, since the caller that would give the machines back is gone.
                with contextlib.suppress(subprocess.SubprocessError):
                    subprocess.run(
                        self.last.farewell,
                        check=True,
                        stdin=subprocess.DEVNULL,
                        stdout=sys.stderr,
                        timeout=_FAREWELL_TIMEOUT,
                    )
                    return
                time.sleep(_FAREWELL_DELAY)
