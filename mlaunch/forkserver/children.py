"""What the fork server has forked."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from mlaunch.agent.stack_requests import state_of
from mlaunch.base import linux
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import Reaped

_STOPPED_TIMEOUT = 1.0  # seconds between looks at an agent that does not end


@dataclass(frozen=True)
class Child:
    """An agent, or a process that counts devices: both answer on a channel whose last word is ours. Or a trial."""

    pid: int
    pidfd: int
    channel: Channel | None
    is_agent: bool = False

    def say_last(self, code: int) -> None:
        """Says how it ended; nobody hears of it any more."""
        if self.channel is not None:
            self.channel.try_send(Reaped(code))
        self.hang_up()

    def hang_up(self) -> None:
        """Closes its channel."""
        if self.channel is not None:
            self.channel.close()

    def wait_for_agent(self) -> None:
        """Waits until an agent has ended, which its grace period bounds; wakes one that somebody has stopped."""
        number = signal.SIGCONT  # it ends its launch, and tidies up
        while not linux.wait_readable([self.pidfd], _STOPPED_TIMEOUT):
            if linux.is_stopped(self.pid) or state_of(self.pid) == "t":
                os.kill(self.pid, number)
                number = signal.SIGKILL
        os.waitpid(self.pid, 0)
