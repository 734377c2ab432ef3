"""The children of the fork server: agents, counts of devices, trial imports."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from mlaunch.base import linux, own_files
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import AgentsEnd, AgentStarted, Reaped
from mlaunch.protocol.server_messages import RestingAgentHears, RestingAgentSays, ServeNext

_MOST_LAUNCHES = 200  # of one agent, which grows by 16 KB with each
AGENT_TIMEOUT = 60.0  # seconds beyond the grace period for an agent to end its ranks and what they left
_STOPPED_TIMEOUT = 1.0  # seconds between checks of an agent that does not end


@dataclass
class Child:
    """An agent or a count of devices, which answer on a channel whose last record is ours; or a trial import.

    ``link``: to an agent that may serve one launch after another. The channel is its latest launch's.
    """

    pid: int
    pidfd: int
    channel: AgentsEnd | None
    is_agent: bool = False
    link: Channel[RestingAgentSays, RestingAgentHears] | None = None
    rests: bool = False  # between two launches, or after its last
    launches: int = 0
    directory: str = ""  # that it removes at its end, unless it is killed

    @property
    def is_trial(self) -> bool:
        """True if this child tries an import."""
        return self.channel is None

    def fds(self) -> list[int]:
        """Return the descriptors, which no other process may have."""
        channels = [channel for channel in (self.channel, self.link) if channel is not None]
        return [self.pidfd, *(channel.fileno() for channel in channels)]

    def hears_free(self) -> bool:
        """Note that an agent is free; False if it has ended instead."""
        if self.link is None:
            return False
        try:
            self.link.receive()
        except EOFError:
            self.dismiss()
            return False
        self.rests = True
        return True

    def serves(self, launch: ServeNext, fds: Sequence[int]) -> bool:
        """Ask a resting agent to serve one more launch; False if it cannot."""
        # By its main thread's state: waitid reports a stop only when the last thread has stopped, the store's too, and
        # a launch given to a stopped agent would wait.
        if not self.rests or self.link is None or self._is_stopped():
            return False
        try:
            self.link.send(launch, fds)
        except OSError:  # it has been killed
            return False
        self.rests = False
        return True

    def begin(self, channel: AgentsEnd) -> None:
        """Take the channel of a launch that an agent now serves, and announce the agent to the launcher."""
        if self.channel is not None:
            self.channel.close()
        self.channel = channel
        self.launches += 1
        # With a pidfd: by the pid, the launcher could kill another process that has the number since.
        channel.try_send(AgentStarted(self.pid), [self.pidfd])

    def dismiss(self) -> None:
        """Make an agent end: at once if it rests, else after its launch."""
        if self.link is None:
            return
        self.link.close()
        self.link = None
        self.end_stopped()

    def end_stopped(self) -> None:
        """Kill an agent that was told to leave, but is stopped and so would stay."""
        # Its launch is over, so nothing is lost; stopped, it would never see the end of its channel.
        if self.rests and self.link is None and self._is_stopped():
            os.kill(self.pid, signal.SIGKILL)

    def _is_stopped(self) -> bool:
        return linux.is_stopped(self.pid)

    def say_last(self, code: int) -> None:
        """Send its exit code as the last record, and close its channels."""
        if self.channel is not None:
            self.channel.try_send(Reaped(code))
        self.hang_up()

    def hang_up(self) -> None:
        """Close its channels."""
        if self.channel is not None:
            self.channel.close()
        self.dismiss()

    def reap(self) -> int:
        """Reap the child, which has ended; return its status, as os.waitpid does."""
        _, status = os.waitpid(self.pid, 0)
        # Not in the agent, which may have been killed.
        if self.directory:
            own_files.remove_directory(self.directory)
        return status

    def wait_for_agent(self, until: float) -> None:
        """Wait until an agent has ended; wake one that is stopped, and kill it after ``until``."""
        number = signal.SIGCONT  # it ends its launch, and cleans up
        while not linux.wait_readable([self.pidfd], _STOPPED_TIMEOUT):
            late = time.monotonic() > until
            if late or self._is_stopped():
                os.kill(self.pid, signal.SIGKILL if late else number)
                number = signal.SIGKILL
        self.reap()


class Children:
    """All present children of a fork server."""

    def __init__(self) -> None:
        self._by_pidfd: dict[int, Child] = {}
        self.longest_grace = 0.0  # seconds, of the launches

    def __bool__(self) -> bool:
        return bool(self._by_pidfd)

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._by_pidfd.values()))

    def add(self, child: Child) -> None:
        self._by_pidfd[child.pidfd] = child

    def fds(self) -> set[int]:
        """Return the descriptors of all."""
        return {fd for child in self for fd in child.fds()}

    def sources(self) -> list[int]:
        """Return descriptors that can be read when a child has ended, or is free."""
        links = [child.link.fileno() for child in self if child.link is not None and not child.rests]
        return [*self._by_pidfd, *links]

    def remove(self, child: Child) -> None:
        del self._by_pidfd[child.pidfd]

    def ended(self, ready: Collection[int]) -> list[Child]:
        """Return those that have ended; the caller reaps and removes each."""
        return [child for pidfd, child in self._by_pidfd.items() if pidfd in ready]

    def hear_free(self, ready: Collection[int]) -> list[Child]:
        """Return the agents that have become free. At most one of them rests; the others are dismissed."""
        free = []
        for child in self:
            if not child.rests and child.link is not None and child.link.fileno() in ready:
                another = self.resting
                if child.hears_free():
                    free.append(child)
                    if another is not None or child.launches >= _MOST_LAUNCHES:
                        child.dismiss()
        return free

    @property
    def busy(self) -> bool:
        """True if any has something to do."""
        return any(not child.rests for child in self)

    @property
    def resting(self) -> Child | None:
        """The agent that can serve a launch at once."""
        return next((child for child in self if child.rests and child.link is not None), None)

    def dismiss(self) -> None:
        """Make the resting agent end."""
        if (child := self.resting) is not None:
            child.dismiss()

    def outlive_caller(self) -> None:
        """Wait for the agents of a caller that is gone; they see the ends of their channels, once ours are closed."""
        for child in self:
            child.hang_up()
        until = time.monotonic() + self.longest_grace + AGENT_TIMEOUT
        for agent in [child for child in self if child.is_agent]:
            agent.wait_for_agent(until)
