"""Heartbeats between a caller and its machines, and the caller's other timeouts.

The caller sends heartbeats, and machines that receive none leave. When a caller ends, or is killed, its streams end. If
its machine loses power or its network, they do not: no packet comes then, for hours unless somebody sends one.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from mlaunch.engines.caller.launch.machine import Machine
from mlaunch.engines.wire.member_messages import Heartbeat
from mlaunch.protocol.messages import PartSays

if TYPE_CHECKING:
    from mlaunch.engines.wire.member_streams import CallersStream


BEATS = 5  # heartbeats in the time after which a machine leaves, at least
_LONGEST = 10.0  # seconds between two: they also show that a machine does not answer
EndOf = Callable[[Machine], tuple[str, str]]  # why it ended, in the engine's words, and what its member wrote last
_MISSED = 2.5  # heartbeats without an answer


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


class Patience:
    """The time limits of one launch, in seconds.

    Args:
        patience: How long to wait for a machine that another machine has reported lost.
        deadline: When unread output no longer delays the launch; None: it does until the end.
        heartbeat_timeout: The engine's. It determines how often machines must answer; None: they need not.
    """

    def __init__(self, patience: float, deadline: float | None, heartbeat_timeout: float | None = None) -> None:
        self._patience = patience
        self._give_up_at = math.inf
        self._lift_at = math.inf if deadline is None else time.monotonic() + deadline
        self._silence = math.inf if heartbeat_timeout is None else interval(heartbeat_timeout) * _MISSED
        self._look_at = time.monotonic() + self._silence
        self._silent = set[int]()  # numbers of machines that were reported as silent

    def milliseconds(self, other: float) -> float | None:
        """Return how many milliseconds a poll may take, if something else is due at ``other``; None: no limit."""
        due = min(self._give_up_at, self._lift_at, self._look_at, other)
        return None if due == math.inf else 1000 * max(0.0, due - time.monotonic())

    def begin_to_give_up(self) -> None:
        """Note that a machine was reported lost by another one."""
        self._give_up_at = min(self._give_up_at, time.monotonic() + self._patience)

    def take_due(self) -> tuple[bool, bool]:
        """Return whether to give up now, and whether the deadline has passed; each is True only once."""
        now = time.monotonic()
        gives_up, lifts = now >= self._give_up_at, now >= self._lift_at
        self._give_up_at = math.inf if gives_up else self._give_up_at
        self._lift_at = math.inf if lifts else self._lift_at
        return gives_up, lifts

    def news(self, machines: Collection[Machine], end_of: EndOf) -> Iterator[PartSays]:
        """Yield news of machines that do not answer any more, once for each until it answers again."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + self._silence
        silent = [machine for machine in machines if machine.is_silent(self._silence)]
        for machine in silent:
            if machine.number not in self._silent:
                guess = f"is it cut off, or was its member stopped? kill -CONT {machine.pid} there continues that"
                why = end_of(machine)[0] or guess
                yield PartSays("engines", f"host {machine.host} has not answered for {self._silence:g} s: {why}")
        self._silent = {machine.number for machine in silent}
