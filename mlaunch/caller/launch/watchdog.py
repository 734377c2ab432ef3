"""What a caller does by itself where a launch's own processes do not answer: kill the agent, then the fork server.

The agent keeps the deadline and the grace period. It cannot if somebody has stopped it (SIGSTOP, a debugger, a frozen
cgroup), so its caller watches it, a moment more patient than it should be.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mlaunch.base import linux
from mlaunch.base.fds import KeptFd
from mlaunch.protocol import error_file, registry
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.protocol.stack_dump import STACKS_TIMEOUT

_REACTION_TIMEOUT = 5.0  # seconds beyond what an agent may take: on a busy machine one that is not stopped is slow
_STEP_DELAY = 2.0  # seconds between steps


@dataclass
class Limits:
    """``kill_server`` ends the fork server at once. Times in seconds."""

    grace_period: float
    deadline: float | None
    kill_server: Callable[[], None]
    agent: KeptFd | None = None  # its pidfd, once it is known
    _due: float | None = None
    _steps: list[str] = field(default_factory=lambda: ["agent", "server", "nobody"])

    def __post_init__(self) -> None:
        if self.deadline is not None:
            self._due = time.monotonic() + self.deadline + self._reaction()

    def timeout(self) -> float | None:
        """Returns the seconds until ``overdue`` may be true; None: it never is."""
        return None if self._due is None else max(0.0, self._due - time.monotonic())

    def begin_cancel(self, *, force: bool) -> None:
        """Begins to count: the agent was asked to end the launch. To ask again only shortens what was begun."""
        self._bring_forward(_STEP_DELAY if force else self._reaction())

    def agent_ended(self) -> None:
        """The fork server has nothing left to do but to say so."""
        self._bring_forward(2 * _REACTION_TIMEOUT)  # it also ends what the launch left

    def _bring_forward(self, seconds: float) -> None:
        due = time.monotonic() + seconds
        self._due = due if self._due is None else min(self._due, due)

    def overdue(self) -> str:
        """Takes the next step, if it is due; returns who was killed, or "nobody" if nobody is left to be; else ""."""
        if self._due is None or time.monotonic() < self._due:
            return ""
        self._due = time.monotonic() + _STEP_DELAY
        step = self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]
        if step == "agent" and not self._agent_lives():
            step = self._steps.pop(0)
        if step == "agent" and self.agent is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.agent.fd, signal.SIGKILL)
        elif step == "server":
            self.kill_server()
        return step

    def _agent_lives(self) -> bool:
        """Tells whether it is known, and has not ended."""
        return self.agent is not None and self.agent.intact() and not linux.wait_readable([self.agent.fd], 0.0)

    def close(self) -> None:
        """Lets go of the agent."""
        if self.agent is not None:
            self.agent.close()

    def _reaction(self) -> float:
        return STACKS_TIMEOUT + self.grace_period + _REACTION_TIMEOUT


def remove_names(spec: LaunchSpec, agreed: LaunchSpec) -> None:
    """Removes the files of an agent that was killed. ``agreed``: the launch as its machines have agreed on it."""
    registry.remove(spec.context.environ, registry.name_of(agreed.launch_id, agreed.rank_start))
    error_file.remove_directory(spec)
