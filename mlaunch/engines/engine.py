"""What an engine is: it places a process on each machine and says what becomes of it. All else is the launch's own."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlaunch.caller.options import Options
    from mlaunch.caller.settle import Ended
    from mlaunch.engines.cluster import Cluster


@dataclass(frozen=True)
class Ends:
    """Our ends of a process's standard streams: descriptors, which the receiver owns. ``stderr`` -1: it has none."""

    stdin: int
    stdout: int
    stderr: int = -1


class Placement(ABC):
    """Machines that an engine gives to one launch, or to several one after the other.

    ``sizes``: how many ranks each is to have, None where the option ``n_gpus`` says it.
    """

    sizes: Sequence[int | None]

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

    @abstractmethod
    def cancel(self) -> None:
        """Ends all processes and gives the machines back. Called once, in every case; does not wait for long."""


class Engine(ABC):
    """Whoever writes one implements ``place``. ``python``: the interpreter on the machines; None: as here."""

    def __init__(self, python: str | None = None) -> None:
        self.python = python or sys.executable

    @abstractmethod
    def place(self, machines: int | None, command: Sequence[str]) -> Placement:
        """Asks for machines, on each of which ``command`` is to run; does not wait. None: the engine's own number."""

    def hold(
        self, machines: int | None = None, n_gpus: int | None = None, *, idle_timeout: float | None = None
    ) -> Cluster:
        """Takes machines that stay until ``close()``, for calls with ``engine=`` what this returns.

        Waits until they are there. ``n_gpus``: ranks on each, for calls that do not say it. ``idle_timeout``: seconds
        without a call after which they are given back. They are, too, when this process ends, however it ends.

        Raises:
            LaunchError: The engine does not give them, or mlaunch cannot run there.
        """
        from mlaunch.engines.cluster import Cluster

        cluster = Cluster(self, machines, n_gpus, idle_timeout)
        cluster.open()
        return cluster

    def call(
        self, options: Options, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Ended:
        """Runs a function on machines of its own; see ``call_on_machines``."""
        from mlaunch.engines.call import call_on_machines
        from mlaunch.engines.cluster import Cluster

        cluster = Cluster(self, options.machines, options.n_gpus, None)
        try:
            return call_on_machines(cluster, options, function, args, kwargs)
        finally:
            cluster.close()
