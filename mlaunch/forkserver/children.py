"""What the fork server has forked."""

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

_MOST_LAUNCHES = 200  # of one agent, which has 16 KB more after each
AGENT_TIMEOUT = 60.0  # seconds beyond its grace period, in which it ends its ranks and what they left
_STOPPED_TIMEOUT = 1.0  # seconds between looks at an agent that does not end


@dataclass
class Child:
    """An agent, or a process that counts devices: both answer on a channel whose last word is ours. Or a trial.

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
        """Whether this child tries an import."""
        return self.channel is None

    def fds(self) -> list[int]:
        """Returns the descriptors, which are no other process's business."""
        channels = [channel for channel in (self.channel, self.link) if channel is not None]
        return [self.pidfd, *(channel.fileno() for channel in channels)]

    def hears_free(self) -> bool:
        """Takes in that an agent is free; False if it has ended instead."""
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
        """Asks an agent that rests to serve one more launch; False if it cannot."""
        # Whether somebody has stopped it, its main thread's state says: waitid tells only when the last thread has
        # stopped, too late for the store's, and a launch given to a stopped agent would wait.
        if not self.rests or self.link is None or self._is_stopped():
            return False
        try:
            self.link.send(launch, fds)
        except OSError:  # it has been killed
            return False
        self.rests = False
        return True

    def begin(self, channel: AgentsEnd) -> None:
        """Takes the channel of a launch that an agent now serves, and tells the launcher of the agent."""
        if self.channel is not None:
            self.channel.close()
        self.channel = channel
        self.launches += 1
        # With a pidfd, by which the launcher can kill the agent, and no other process that has got its number since.
        channel.try_send(AgentStarted(self.pid), [self.pidfd])

    def dismiss(self) -> None:
        """Lets an agent end: at once if it rests, else after its launch."""
        if self.link is None:
            return
        self.link.close()
        self.link = None
        self.end_stopped()

    def end_stopped(self) -> None:
        """Ends an agent that has been told to leave, but was stopped and so would stay."""
        # Its launch is over, so nothing is lost; a process that is stopped would never see the end of its channel.
        if self.rests and self.link is None and self._is_stopped():
            os.kill(self.pid, signal.SIGKILL)

    def _is_stopped(self) -> bool:
        return linux.is_stopped(self.pid)

    def say_last(self, code: int) -> None:
        """Says how it ended; nobody hears of it any more."""
        if self.channel is not None:
            self.channel.try_send(Reaped(code))
        self.hang_up()

    def hang_up(self) -> None:
        """Closes its channels."""
        if self.channel is not None:
            self.channel.close()
        self.dismiss()

    def reap(self) -> int:
        """Takes in that it has ended; returns its status, as os.waitpid does."""
        _, status = os.waitpid(self.pid, 0)
        # Here, not in the agent: that may have been killed.
        if self.directory:
            own_files.remove_directory(self.directory)
        return status

    def wait_for_agent(self, until: float) -> None:
        """Wait until an agent has ended, and wake one that somebody has stopped; after ``until`` it is killed."""
        number = signal.SIGCONT  # it ends its launch, and tidies up
        while not linux.wait_readable([self.pidfd], _STOPPED_TIMEOUT):
            late = time.monotonic() > until
            if late or self._is_stopped():
                os.kill(self.pid, signal.SIGKILL if late else number)
                number = signal.SIGKILL
        self.reap()


class Children:
    """All that a fork server has now."""

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
        """Returns the descriptors of all."""
        return {fd for child in self for fd in child.fds()}

    def sources(self) -> list[int]:
        """Returns what can be read when one has ended, or is free."""
        links = [child.link.fileno() for child in self if child.link is not None and not child.rests]
        return [*self._by_pidfd, *links]

    def remove(self, child: Child) -> None:
        del self._by_pidfd[child.pidfd]

    def ended(self, ready: Collection[int]) -> list[Child]:
        """Returns those that have ended; each is to be removed as it is reaped."""
        return [child for pidfd, child in self._by_pidfd.items() if pidfd in ready]

    def hear_free(self, ready: Collection[int]) -> list[Child]:
        """Takes in which agents are free. One of them can rest at most; others are dismissed."""
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
        """Whether any has something to do."""
        return any(not child.rests for child in self)

    @property
    def resting(self) -> Child | None:
        """The agent that can serve a launch at once."""
        return next((child for child in self if child.rests and child.link is not None), None)

    def dismiss(self) -> None:
        """Lets the agent end that rests."""
        if (child := self.resting) is not None:
            child.dismiss()

    def outlive_caller(self) -> None:
        """Waits for the agents of a caller that is gone; their channels tell all of them, once we hold them no more."""
        for child in self:
            child.hang_up()
        until = time.monotonic() + self.longest_grace + AGENT_TIMEOUT
        for agent in [child for child in self if child.is_agent]:
            agent.wait_for_agent(until)
