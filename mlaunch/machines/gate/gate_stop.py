"""The step at which the ranks of all machines stop, if each machine has its own caller: the gate finds it.

A machine asks for a stop. The gate makes all machines freeze their ranks and report how often each rank has looked for
a stop, and tells all at which look to stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from mlaunch.agreed_stop.wire import AgreedStop, is_look
from mlaunch.machines.wire import control_protocol
from mlaunch.machines.wire.control_protocol import Record

_REASON = 100  # characters
_PATIENCE = 1e9  # seconds


class GateStop:
    """The stop of one launch. Its members are the machines that have not ended, by number."""

    def __init__(self) -> None:
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._agreed: AgreedStop | None = None
        self._reason = ""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, machine: int, writer: asyncio.StreamWriter) -> None:
        """Add a machine when the launch begins. ``writer``: that of its control connection."""
        self._writers[machine] = writer

    def remove(self, machine: int) -> None:
        """Leave a machine out: its ranks are gone, or it is lost."""
        if self._writers.pop(machine, None) is not None:
            self.take_steps()

    def hear(self, machine: int, record: Mapping[str, object]) -> None:
        """Handle a machine's record about a stop; ignore what is invalid in it."""
        reason, patience, looks = record.get("stop"), record.get("patience"), record.get("frozen")
        sensible = isinstance(reason, str) and reason.isprintable() and 0 < len(reason) <= _REASON
        if isinstance(patience, bool) or not isinstance(patience, int | float) or not 0 <= patience <= _PATIENCE:
            patience = None
        if sensible and patience is not None and self._agreed is None:
            self._reason, clock = str(reason), asyncio.get_running_loop().time
            self._agreed = AgreedStop(self, clock, machine if record.get("unsure") is True else None)
            self._agreed.begin(float(patience))
        elif self._agreed is not None and is_look(looks):
            self._agreed.freeze.take(machine, looks)
        self.take_steps()

    def take_steps(self) -> None:
        """Take the steps that are due."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, agreed = None, self._agreed
        if agreed is None:
            return
        agreed.take_steps()
        if agreed.unused and agreed.asked_by is not None:
            self._agreed = None
            self._post(agreed.asked_by, {"unused": 1})
        elif agreed.due < float("inf"):
            self._timer = asyncio.get_running_loop().call_at(agreed.due, self.take_steps)

    # The members, as AgreedStop sees them

    def working(self) -> Collection[int]:
        return list(self._writers)

    def freeze(self, member: int) -> None:
        self._post(member, {"freeze": self._reason})

    def thaw(self, member: int) -> None:
        self._post(member, {"thaw": 1})

    def stop_at(self, member: int, look: int) -> None:
        self._post(member, {"stop_at": look, "reason": self._reason})

    def _post(self, member: int, record: Record) -> None:
        if member in self._writers:
            control_protocol.post(self._writers[member], control_protocol.encode(record))
