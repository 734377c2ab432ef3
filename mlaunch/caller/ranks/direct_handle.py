"""A launch whose ranks send their values to its caller without waking their agent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from mlaunch.caller.launch.handle import LaunchHandle
from mlaunch.caller.ranks.direct_channels import DirectWays
from mlaunch.protocol.messages import AgentSays, AnswerKind, DirectAnswer, RankAnswered, RanksStarting, RankStarted
from mlaunch.protocol.server_messages import BoardFds


@dataclass
class DirectHandle(LaunchHandle):
    """Takes the ways by which they do as its agent offers them, and their values as these come."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number = 0  # of the call that was begun last
        self._by_itself = False  # it is over when all values are there; else when the agent says so
        self._direct = DirectWays()

    def intact(self) -> bool:
        return super().intact() and self._direct.intact()

    def close(self) -> None:
        super().close()
        self._direct.close()

    def _show(self, record: AgentSays, fds: Sequence[int]) -> None:
        if isinstance(record, RanksStarting) and (offered := BoardFds.of(fds).direct) is not None:
            self._direct.take_answers(offered, self.relay.watch(offered.all_there))
        elif isinstance(record, RankStarted) and record.channels:
            self._direct.take_rank(record.rank, fds[0])
        self._note_values()
        super()._show(record, fds)

    def _take_answers(self, ready: set[int]) -> None:
        if self._direct.fd in ready:
            self._read_answers()
            self._note_values()

    def _read_answers(self) -> None:
        """Takes in the values that ranks have sent without their agent."""
        try:
            answers = self._direct.drain()
        except EOFError:  # the ranks are gone, and their agent
            self.relay.unwatch(self._direct.fd)
            self._direct.close_answers()
            return
        for answer in answers:
            if answer[1] == self._number:
                self._take_answer(answer)

    def _take_answer(self, answer: DirectAnswer) -> None:
        local_rank, _, stale, data = answer
        rank = self.spec.rank(local_rank)
        pid = self.history.started[rank].pid
        self.outcome.take(RankAnswered(rank, pid, AnswerKind.VALUE, False, time.monotonic(), stale, data), [])

    def _note_values(self) -> None:
        """Notes whether all values of a call are there that is over with them."""
        if self._by_itself and len(self.outcome.values) == self.spec.world_size:
            self.over = True
