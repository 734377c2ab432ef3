"""Messages about what a machine waits for while the machines of a launch join."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

from mlaunch.machines.wire import control_protocol
from mlaunch.protocol.messages import Waiting

# In most launches all machines have joined before that, and nothing is printed.
_FIRST_WORD_DELAY = 2.0  # seconds before the first message
_REMINDER_DELAY = 30.0  # seconds before the same message again
_LOOK_DELAY = 0.5  # seconds between checks whether there is something to say


class JoiningWords:
    """The messages of a machine that joins. ``there``: where the gate should be; ``tell``: sends one to the agent."""

    def __init__(self, there: str, tell: Callable[[Waiting], object]) -> None:
        self._there, self._tell = there, tell
        self._start = time.monotonic()
        self.trouble: OSError = OSError("trying")  # why there is no connection
        self.joined = ""  # which machines have joined, according to the gate's last record
        self.over = False  # all machines have joined

    async def remind(self) -> None:
        """Tell the agent what this machine waits for, when that changes and every 30 s, until all have joined."""
        told, at = "", self._start
        await asyncio.sleep(_FIRST_WORD_DELAY)
        while not self.over:
            now, state = time.monotonic(), self.joined or str(self.trouble)
            if state != told or now - at >= _REMINDER_DELAY:
                self._tell(Waiting(self.state()))
                told, at = state, now
            await asyncio.sleep(_LOOK_DELAY)

    def state(self) -> str:
        """Return what this machine waits for, and how long it has waited."""
        waited = f"after {time.monotonic() - self._start:.0f} s"
        if self.joined:
            return f"{waited} at {self._there}: {self.joined}"
        trouble = self.trouble
        if isinstance(trouble, control_protocol.UnprovedError):
            return f"{waited} what answers at {self._there} is not taken for the master ({trouble}): {trouble.advice}"
        advice = "is the launch started on the machine of rank 0, with this port, and does a firewall let it through?"
        if isinstance(trouble, socket.gaierror):
            advice = "is this the name of the machine of rank 0, and does this machine know it? Or give an address"
        return f"{waited} no master answers at {self._there} ({trouble.strerror or trouble}): {advice}"
