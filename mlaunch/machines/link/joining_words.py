"""Says what a machine waits for while the machines of a launch join."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

from mlaunch.machines.wire import control_protocol
from mlaunch.protocol.messages import Waiting

# Most launches have all their machines by then, and print nothing.
_FIRST_WORD_DELAY = 2.0  # seconds before the first word on what is waited for
_REMINDER_DELAY = 30.0  # seconds between words that say the same
_LOOK_DELAY = 0.5  # seconds between looks whether there is a word to say


class JoiningWords:
    """What a joining machine waits for, in words. ``there``: where the gate should be; ``tell``: tells the agent."""

    def __init__(self, there: str, tell: Callable[[Waiting], object]) -> None:
        self._there, self._tell = there, tell
        self._start = time.monotonic()
        self.trouble: OSError = OSError("trying")  # why there is no connection
        self.joined = ""  # who has joined, as the gate told last
        self.over = False  # all have

    async def remind(self) -> None:
        """Says what is waited for, when that changes and now and then, until the launch runs."""
        told, at = "", self._start
        await asyncio.sleep(_FIRST_WORD_DELAY)
        while not self.over:
            now, state = time.monotonic(), self.joined or str(self.trouble)
            if state != told or now - at >= _REMINDER_DELAY:
                self._tell(Waiting(self.state()))
                told, at = state, now
            await asyncio.sleep(_LOOK_DELAY)

    def state(self) -> str:
        """Says what is waited for, and since when."""
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
