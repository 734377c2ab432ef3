"""What an engine gives: a process on each of several machines, and word of what becomes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ends:
    """Our ends of a process's standard streams: descriptors, which the receiver owns. ``stderr`` -1: it has none.

    ``secret``: what the process knows, too, where others can write to what is between it and us.
    """

    stdin: int
    stdout: int
    stderr: int = -1
    secret: str = field(default="", repr=False, kw_only=True)


class Placement(ABC):
    """Machines that an engine gives to one launch, or to several one after the other.

    ``sizes``: how many ranks each is to have, None where the option ``n_gpus`` says it. ``at_once``: how many may be
    starting at a time; None: all. ``farewell``: a command that gives the machines back from one of them, if this
    process cannot; (): they are free as soon as nothing runs there. ``queues``: whether what ``state()`` says may last
    as long as a queue does; False: no longer than ``join_timeout``.
    """

    sizes: Sequence[int | None]
    at_once: int | None = None
    farewell: Sequence[str] = ()
    queues: bool = True

    @abstractmethod
    def state(self) -> str:
        """Says in the engine's words what the machines wait for; "" once they are there.

        Raises:
            LaunchError: They will not come.
        """

    @abstractmethod
    def start(self, machine: int) -> Ends:
        """Starts the command on a machine, by number from 0. Called once for each, when ``state()`` is ""."""

    @abstractmethod
    def fate(self, machine: int) -> str:
        """Says what the engine knows of why a machine was lost: "NODE_FAIL on n2", "exited with code 255"; or ""."""

    def preempted(self) -> bool:
        """Tells whether the scheduler has taken the machines for somebody else, or is about to, and would give others.

        Not so if their time is over. An engine that does not know says False.
        """
        return False

    @abstractmethod
    def cancel(self) -> None:
        """Ends all processes and gives the machines back. Called in every case, and again if it was interrupted."""
