"""The caller's own measures if a launch's processes do not answer: kill the agent, then the fork server.

The agent keeps the deadline and the grace period. It cannot if somebody has stopped it (SIGSTOP, a debugger, a frozen
cgroup), so its caller watches it, with slightly longer limits. The agent does not know the deadline of a call that
ranks get past it: the caller keeps that, and tells the agent when it has passed.
"""

from __future__ import annotations

import contextlib
import enum
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from mlaunch.base import linux
from mlaunch.base.deadline import NEVER, Deadline
from mlaunch.base.fds import KeptFd
from mlaunch.base.frames import STACKS_TIMEOUT
from mlaunch.protocol import launch_files, registry
from mlaunch.protocol.spec import LaunchSpec


@dataclass
class WatchdogTimes:
    """The limits, in seconds. ``reaction``: the extra time of an agent, because on a busy machine it may be slow.

    ``step``: between steps.
    """

    reaction: float = 5.0
    step: float = 2.0


times = WatchdogTimes()


class Backing(Protocol):
    """The process or machines behind a launch's agent."""

    silence: str  # a sentence that it was killed, because it did not answer in time

    def kill(self) -> None:
        """End it at once, and the launch with it."""

    def describe_end(self) -> str:
        """Return how it ended, in words."""


class Killed(enum.Enum):
    """The processes that do not answer any more, in the order of their killing. ``NONE``: it is not time yet."""

    NONE = enum.auto()
    AGENT = enum.auto()
    SERVER = enum.auto()
    NOTHING_LEFT = enum.auto()  # both were killed, so there is no word to wait for


@dataclass
class Limits:
    """The limits of one launch. ``kill_server`` ends the fork server at once. Times in seconds.

    ``tell_late`` tells the agent that the deadline, which counts from ``begun`` on, has passed; None: the agent keeps
    it.
    """

    grace_period: float
    deadline: float | None
    kill_server: Callable[[], None]
    agent: KeptFd | None = None  # its pidfd, once it is known
    tell_late: Callable[[], object] | None = None
    begun: float | None = None  # None: now
    _next_step: Deadline = field(default_factory=Deadline)
    _last: Killed = field(default=Killed.NONE)

    def __post_init__(self) -> None:
        if self.deadline is not None:
            begun = time.monotonic() if self.begun is None else self.begun
            self._next_step.start(self.deadline + (self._reaction() if self.tell_late is None else 0.0), begun)

    def timeout(self) -> float | None:
        """Return the seconds until ``kill_if_overdue`` has something to do; None if it never has."""
        due = self._next_step.due
        return None if due == NEVER else max(0.0, due - time.monotonic())

    def begin_cancel(self, *, force: bool) -> None:
        """Begin to count: the agent was asked to end the launch. Asking again can only shorten the time."""
        self._act_within(times.step if force else self._reaction())

    def hold(self, held: bool) -> None:
        """Stop counting towards the deadline, or continue."""
        self._next_step.hold(time.monotonic(), held=held)

    def agent_ended(self) -> None:
        """Limit the time for the fork server's report that the agent has ended, which is all that is left to do."""
        self._act_within(2 * times.reaction)  # the server also ends what the launch left

    def _act_within(self, seconds: float) -> None:
        if self.tell_late is not None:  # a deadline kept here, about which the agent need not be told any more
            self.tell_late = None
            self._next_step.cancel()
        self._next_step.bring_forward(time.monotonic() + seconds)

    def kill_if_overdue(self) -> Killed:
        """Take the next step, if it is due; return which process was killed."""
        if time.monotonic() < self._next_step.due:
            return Killed.NONE
        if self.tell_late is not None:
            self.tell_late()
            self.begin_cancel(force=False)
            return Killed.NONE
        self._next_step.start(times.step, time.monotonic())
        self._last = self._next()
        if self._last is Killed.AGENT and self.agent is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.agent.fd, signal.SIGKILL)
        elif self._last is Killed.SERVER:
            self.kill_server()
        return self._last

    def _next(self) -> Killed:
        if self._last is Killed.NONE and self._agent_lives():
            return Killed.AGENT
        return Killed.SERVER if self._last in {Killed.NONE, Killed.AGENT} else Killed.NOTHING_LEFT

    def _agent_lives(self) -> bool:
        """True if the agent is known, and has not ended."""
        return self.agent is not None and self.agent.intact() and not linux.wait_readable([self.agent.fd], 0.0)

    def close(self) -> None:
        """Close the agent's pidfd."""
        if self.agent is not None:
            self.agent.close()

    def _reaction(self) -> float:
        return STACKS_TIMEOUT + self.grace_period + times.reaction


def remove_names(spec: LaunchSpec, agreed: LaunchSpec) -> None:
    """Remove the files of an agent that was killed. ``agreed``: the launch as its machines have agreed on it."""
    registry.remove(spec.context.environ, registry.name_of(agreed.launch_id, agreed.rank_start))
    launch_files.remove_error_directory(spec)
    launch_files.remove_temporary(agreed)
