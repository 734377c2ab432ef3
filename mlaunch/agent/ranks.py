"""What a supervisor knows of a rank."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mlaunch.protocol import payload
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import Errand, Kind, Release, RunCall


@dataclass
class RankProcess:
    """A rank as its supervisor knows it. ``pid`` leads the rank's process group."""

    rank: int
    local_rank: int
    pid: int
    pidfd: int
    channel: Channel  # on which it gets its calls
    crash_fd: int  # of its stacks, if it crashes
    stack_fd: int  # the pipe of its stacks, if we ask
    aside: Channel | None = None  # on which a thread of a rank that stays answers, whatever the rank does
    error_file: str = ""  # in which it may note why it fails
    stacks: str = ""
    answer_fd: int = -1  # of the present call; -1: there was none
    answer: Kind | None = None  # to the present call
    stopped: bool = False  # told to stop, or killed, by us
    gone: bool = False  # reaped

    @property
    def alive(self) -> bool:
        """It has not been told to stop."""
        return not self.stopped and not self.gone

    @property
    def working(self) -> bool:
        """It has not even answered."""
        return self.alive and self.answer is None

    def begin_call(self, number: int, call_fd: int | None, errand: Errand = Errand.RUN) -> None:
        """Sends it a call, with a memfd for this call's answer alone: a caller may still map the last one's."""
        if self.answer_fd >= 0:
            os.close(self.answer_fd)
        self.answer, self.answer_fd = None, payload.create(f"rank-{self.rank}")
        fds = [self.answer_fd] if call_fd is None else [self.answer_fd, call_fd]
        self.channel.try_send(RunCall(number, errand), fds)

    def release(self) -> None:
        """Tells it that nothing more comes."""
        self.channel.try_send(Release())

    def close(self) -> None:
        """Lets go of what is known of it, once it is reaped."""
        self.gone = True
        self.channel.close()
        if self.aside is not None:
            self.aside.close()
        for fd in (self.pidfd, self.crash_fd, self.stack_fd, *([self.answer_fd] if self.answer_fd >= 0 else [])):
            os.close(fd)
