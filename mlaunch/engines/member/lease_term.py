"""A machine's side of the lease: a machine that hears no sign of its caller in time leaves.

The caller's side, and why a lease is needed, is in ``mlaunch/engines/caller/lease.py``.
"""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from types import FrameType
from typing import TYPE_CHECKING

from mlaunch.base import linux, signals
from mlaunch.engines.wire.member_messages import Lease

if TYPE_CHECKING:
    from mlaunch.engines.wire.member_streams import MembersStream

_FAREWELL_TIMEOUT = 60.0  # seconds for the command that gives the machines back
_FAREWELLS, _FAREWELL_DELAY = 60, 5.0  # how often they are given back, and seconds between; a controller may be away
_OTHERS_DELAY = 1.0  # seconds for the other machines to say why they leave, too, before all are given back


class Term:
    """A machine's side. ``lease``: as it was told last; None: it has not been told, and stays."""

    def __init__(self, stream: MembersStream) -> None:
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
                # By this process, since whoever would give the machines back is gone.
                with contextlib.suppress(subprocess.SubprocessError):
                    subprocess.run(
                        self.lease.farewell,
                        check=True,
                        stdin=subprocess.DEVNULL,
                        stdout=sys.stderr,
                        timeout=_FAREWELL_TIMEOUT,
                    )
                    return
                time.sleep(_FAREWELL_DELAY)


class SignalsHere:
    """Hears signals by which a scheduler asks to stop, for the caller. A member that is a thread leaves them alone."""

    def __init__(self, numbers: Collection[int]) -> None:
        self._reason = ""
        for number in numbers if threading.current_thread() is threading.main_thread() else ():
            signal.signal(number, self._take)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self._reason = signals.name_of(number)

    def take(self) -> str:
        """Returns the name of one that has come, once; "": none has."""
        reason, self._reason = self._reason, ""
        return reason
