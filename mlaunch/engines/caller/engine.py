"""What an engine is: it places a process on each machine and says what becomes of it. All else is the launch's own."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mlaunch.caller.options.launch_options import Options, about
from mlaunch.engines.caller.cluster import Cluster
from mlaunch.engines.caller.engine_arguments import OPTIONAL_NAME
from mlaunch.engines.caller.launch.engine_call import call_on_machines
from mlaunch.engines.caller.launch.kept_launch import open_on_machines
from mlaunch.engines.caller.launch.machines import Machines, say
from mlaunch.engines.caller.placement import Placement

if TYPE_CHECKING:
    from mlaunch.caller.launch.settle import Ended
    from mlaunch.caller.ranks.ranks_launch import RanksLaunch, StayRules


class Engine(ABC):
    """Whoever writes one implements ``place``. ``python``: the interpreter on the machines; None: as here.

    Attributes:
        lease: Seconds after which machines that hear nothing of this process end what runs there and are given back:
            this machine may have lost its power, or a laptop may sleep. None: never. To be set before machines are
            asked for.
    """

    # Of a caller whose machine is cut off no packet tells, so the end of its stream is not enough.
    lease: float | None = 300.0

    def __init__(self, python: str | None = None) -> None:
        OPTIONAL_NAME.check("python", python)
        self.python = python or sys.executable

    @abstractmethod
    def place(self, machines: int | None, command: Sequence[str]) -> Placement:
        """Asks for machines, on each of which ``command`` is to run; does not wait. None: the engine's own number."""

    def ask_for(self, wanted: int | None, n_gpus: int | None) -> Machines:
        """Returns so many machines, which are asked for when they are needed.

        Raises:
            TypeError: One of these, or ``lease``, is no number.
            ValueError: It is none that is allowed.
        """
        about("keep").allowed.check("lease", self.lease)
        about("machines").allowed.check("machines", wanted)
        if not isinstance(n_gpus, str):  # else it is a command's: "auto"
            about("n_gpus").allowed.check("n_gpus", n_gpus)
        return Machines(self.place, self.python, wanted, n_gpus, self.lease)

    def hold(
        self, machines: int | None = None, n_gpus: int | None = None, *, idle_timeout: float | None = None
    ) -> Cluster:
        """Takes machines that stay until ``close()``, for calls with ``engine=`` what this returns.

        Waits until they are there, and says for what. ``n_gpus``: ranks on each, for calls that do not say it.
        ``idle_timeout``: seconds without a call after which they are given back. They are, too, when this process ends,
        however it ends.

        Raises:
            LaunchError: The engine does not give them, or mlaunch cannot run there.
            TypeError: An argument is no number.
            ValueError: It is none that is allowed.
        """
        about("keep").allowed.check("idle_timeout", idle_timeout)
        held = self.ask_for(machines, n_gpus)
        held.open(Options().join_timeout, lambda state: say(f"hold() waits: {state}"))
        return Cluster(held, idle_timeout)

    def call(
        self, options: Options, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Ended:
        """Runs a function on machines of its own; see ``call_on_machines``."""
        machines = self.ask_for(options.machines, options.n_gpus)
        try:
            return call_on_machines(machines, options, function, args, kwargs)
        finally:
            machines.close()

    def open_session(self, options: Options, rules: StayRules) -> RanksLaunch:
        """Starts ranks that stay on machines of their own, which are given back when they end."""
        machines = self.ask_for(options.machines, options.n_gpus)
        try:
            return open_on_machines(machines, options, rules, machines.close)
        except BaseException:
            machines.close()
            raise
