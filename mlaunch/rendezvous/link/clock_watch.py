"""Compares the clock of a machine with that of the gate's machine, for a profile: one file has ranks of both.

link -> gate   {"clock": seconds of the epoch}
gate -> link   {"clock": the same, "now": the gate's seconds of the epoch, "begun": those at which the launch began}
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from mlaunch.protocol.messages.machine_messages import ClockCompared
from mlaunch.rendezvous.control_protocol import Record, is_time

_ROUNDS = 8  # questions at once, of whose answers the fastest counts: the others have waited somewhere
_ANSWER_TIMEOUT = 2.0  # seconds


class ClockWatch:
    """Asks at the beginning, and now and then: the clocks of two machines drift apart.

    ``ranks``: of this machine; ``post``: says something to the gate; ``tell``: to the agent.
    """

    def __init__(self, ranks: range, post: Callable[[Record], object], tell: Callable[[ClockCompared], object]) -> None:
        self._ranks, self._post, self._tell = ranks, post, tell
        self._asked = 0.0
        self._answer: asyncio.Future[ClockCompared] | None = None

    async def run(self, delay: float) -> None:
        """Tells the best of several answers, again and again. ``delay``: seconds between."""
        while True:
            answers = [await self._ask() for _ in range(_ROUNDS)]
            if found := [answer for answer in answers if answer is not None]:
                self._tell(min(found, key=lambda answer: answer.error))
            await asyncio.sleep(delay)

    async def _ask(self) -> ClockCompared | None:
        self._answer = asyncio.get_running_loop().create_future()
        self._asked = time.time()
        self._post({"clock": self._asked})
        try:
            return await asyncio.wait_for(self._answer, _ANSWER_TIMEOUT)
        except asyncio.TimeoutError:
            return None

    def hear(self, record: Record) -> None:
        """Takes an answer in; none that is late, or that no gate gives."""
        heard, now, begun = time.time(), record.get("now"), record.get("begun")
        answer = self._answer
        if answer is None or answer.done() or record.get("clock") != self._asked:
            return
        if now is None or begun is None or not (is_time(now) and is_time(begun)):
            return
        # As NTP does: the answer was given at some time between, so the middle is wrong by half of the round at most.
        at, error = (self._asked + heard) / 2, (heard - self._asked) / 2
        ahead = now - at
        if self._ranks.start == 0:  # where the gate is: it is the same clock
            ahead = error = 0.0
        epoch = heard - time.monotonic()
        compared = ClockCompared(self._ranks.start, len(self._ranks), at, ahead, error, begun, epoch)
        answer.set_result(compared)
