"""A rank as its supervisor knows it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from mlaunch.base.fds import memory_file
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import (
    Answer,
    AnswerFile,
    AnswerKind,
    ControlHears,
    ControlSays,
    Phase,
    RankGone,
    RankHears,
    RankSays,
    Release,
)
from mlaunch.protocol.payload import Payload


@dataclass
class RankProcess:
    """One rank. ``pid`` leads its process group."""

    rank: int
    local_rank: int
    pid: int
    pidfd: int
    channel: Channel[RankSays, RankHears]  # on which it gets its calls
    crash_fd: int  # of its stacks, if it crashes
    stack_fd: int  # the pipe of its stacks, if we ask
    # On which its control thread answers, whatever the rank does.
    control: Channel[ControlSays, ControlHears] | None = None
    error_file: str = ""  # in which it may note why it fails
    of_python: bool = True  # it becomes no other program
    stacks: str = ""
    answer_fd: int = -1  # the memfd for its answers; -1: it has none
    spent_fd: int = -1  # the one before, which may be mapped
    answer: AnswerKind | None = None  # to the present call
    content: Payload = field(default_factory=Payload)  # of this answer
    stopped: bool = False  # told to stop, or killed, by us
    ends_at: float | None = None  # since when it ends, by a failure of its own
    gone: bool = False  # reaped

    @property
    def alive(self) -> bool:
        """True if the rank has not been told to stop, and does not end by itself."""
        return not self.stopped and not self.gone and self.ends_at is None

    @property
    def working(self) -> bool:
        """True if the rank is alive and has not answered yet."""
        return self.alive and self.answer is None

    def begin_call(self, record: bytes, call_fds: list[int]) -> None:
        """Send the rank a RunCall, pickled, with a memfd for answers if it needs one."""
        fds = call_fds if 0 <= self.answer_fd != self.content.memfd else [*call_fds, self._renew()]
        self.answer, self.content = None, Payload(memfd=self.answer_fd)  # it may be written to, whatever is said of it
        self.channel.try_send_pickled(record, fds)

    def give_answer_file(self) -> None:
        """Send the rank a memfd for its next answer."""
        self.channel.try_send(AnswerFile(), [self._renew()])

    def _renew(self) -> int:
        if self.spent_fd >= 0:
            os.close(self.spent_fd)
        # A new one for each large answer: the caller maps it privately, and the next answer would be written under
        # that.
        self.spent_fd, self.answer_fd = self.answer_fd, memory_file(f"rank-{self.rank}")
        return self.answer_fd

    def expect(self, answered: bool) -> None:
        """Note a call that the launcher has sent directly. ``answered``: its value was sent already."""
        self.answer, self.content = AnswerKind.VALUE if answered else None, Payload()

    def take(self, answer: Answer) -> None:
        """Note what the rank has answered."""
        self.answer, self.content = answer.kind, Payload(answer.data, -1 if answer.data else self.answer_fd)

    def release(self) -> None:
        """Tell the rank that nothing more comes."""
        self.channel.try_send(Release())

    def describe_end(
        self, exitcode: int, phase: Phase, now: float, peak_memory: int, hints: tuple[str, ...]
    ) -> RankGone:
        """Return a record of its end. ``now``: when it was reaped; ``peak_memory``: bytes; ``hints``: further lines."""
        return RankGone(
            rank=self.rank,
            pid=self.pid,
            exitcode=exitcode,
            phase=phase,
            answered=self.answer is not None,
            stopped=self.stopped,
            at=now if self.ends_at is None else self.ends_at,
            hints=hints,
            peak_memory=peak_memory,
            of_python=self.of_python,
        )

    def close(self) -> None:
        """Close the descriptors of the rank, once it is reaped."""
        self.gone = True
        self.channel.close()
        if self.control is not None:
            self.control.close()
        for fd in (self.pidfd, self.crash_fd, self.stack_fd, self.answer_fd, self.spent_fd):
            if fd >= 0:
                os.close(fd)
