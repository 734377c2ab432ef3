"""The calls of a launch, which its supervisor drives: a normal launch has one, after which its ranks leave.

``prepared.py`` waits for that call; ``many_calls.py`` runs one call after the other. The supervisor reports what has
come, and these classes act on the launch's state (``launch_state.py``).
"""

from __future__ import annotations

from mlaunch.agent.launch_state import LaunchState
from mlaunch.agent.rank_process import RankProcess
from mlaunch.agent.scene import AgentParts
from mlaunch.base.deadline import NEVER
from mlaunch.protocol.messages import AgentHears, RankAnswered


class Calls:
    """The calls of a launch.

    Attributes:
        must_stay: A rank that ends well is a failure all the same.
    """

    must_stay = False

    def __init__(self, launch: LaunchState, parts: AgentParts) -> None:
        self._launch, self._parts = launch, parts

    def hear(self, _record: AgentHears | None, _fds: list[int]) -> bool:
        """Act on what the launcher says about its calls, and close the descriptors; False if it is something else."""
        return False

    def catch_up(self) -> None:
        """Read from the board which calls were sent, and answered, past this process. Called before answers count."""

    def forward(self, rank: RankProcess, record: RankAnswered) -> None:
        """Pass on what a rank has answered."""
        self._launch.launcher.try_send(record, rank.content.fds())

    def lose_rank(self) -> None:
        """Prepare for the report that a rank has ended."""

    def all_answered(self) -> None:
        """Act once no rank works on the call any more. Called until the call is ``released``."""
        raise NotImplementedError

    def end(self, delay: float) -> None:
        """End the call, which has failed, within that time at the latest."""
        raise NotImplementedError

    def due(self) -> float:
        """Return when ``take_steps`` is to be called though nothing has come."""
        return NEVER

    def take_steps(self) -> None:
        """Take the steps that are due, before those of stopping. Called whenever anything has come."""


class OneCall(Calls):
    """The only call of a launch: its ranks leave after it."""

    def all_answered(self) -> None:
        """Let the ranks go: nobody is left who works with them."""
        self._launch.call.released = True
        self._launch.stopping.endings.close()
        self._launch.stopping.expect_ends()
        for rank in self._launch.ranks.values():
            rank.release()

    def end(self, delay: float) -> None:
        self._launch.stopping.within(delay)
