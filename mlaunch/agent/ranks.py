"""What a supervisor knows of its ranks, and how it learns what they are doing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from mlaunch.protocol import stack_dump
from mlaunch.protocol.messages import Kind, Phase


@dataclass
class RankProcess:
    """A rank as its supervisor knows it. ``pid`` leads the rank's process group."""

    rank: int
    local_rank: int
    pid: int
    pidfd: int
    memfd: int  # of its answer
    crash_fd: int  # of its stacks, if it crashes
    stack_fd: int  # the pipe of its stacks, if we ask
    error_file: str = ""  # in which it may note why it fails
    stacks: str = ""
    answer: Kind | None = None
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


class StackRequests:
    """Ranks that were asked for their stacks and have not answered in full; true while there are any.

    ``request`` asks one rank, and is false if that rank cannot answer.
    """

    def __init__(self, request: Callable[[int, Phase], bool]) -> None:
        self._request = request
        self._pending: dict[int, RankProcess] = {}  # by stack_fd

    def __bool__(self) -> bool:
        return bool(self._pending)

    def fds(self) -> list[int]:
        return list(self._pending)

    def ask(self, rank: RankProcess, phase: Phase) -> None:
        if rank.stack_fd in self._pending:
            return
        while stack_dump.read_some(rank.stack_fd):  # an earlier answer that came too late
            pass
        rank.stacks = ""
        if self._request(rank.pid, phase):
            self._pending[rank.stack_fd] = rank

    def read(self, ready: Collection[int]) -> None:
        for stack_fd in self._pending.keys() & set(ready):
            rank = self._pending[stack_fd]
            text = stack_dump.read_some(stack_fd)
            rank.stacks += text
            if not text or stack_dump.is_whole(rank.stacks):
                del self._pending[stack_fd]

    def forget(self, rank: RankProcess) -> None:
        self._pending.pop(rank.stack_fd, None)

    def clear(self) -> None:
        self._pending.clear()
