"""What an engine is: it places a process on each machine and says what becomes of it. All else is the launch's own."""

from __future__ import annotations

import math
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlaunch.caller.options.launch_options import Options, about
from mlaunch.caller.options.option_values import Name
from mlaunch.caller.ranks.ranks_launch import StayRules
from mlaunch.engines.caller.cluster import Cluster
from mlaunch.engines.caller.launch.engine_call import call_on_machines
from mlaunch.engines.caller.launch.kept_launch import open_on_machines
from mlaunch.engines.caller.launch.machines import Machines, say
from mlaunch.engines.caller.placement import Placement

if TYPE_CHECKING:
    from mlaunch.caller.launch.settle import Ended
    from mlaunch.caller.ranks.ranks_launch import RanksLaunch


OPTIONAL_NAME = Name(optional=True)


class Words:
    """A program and its options, or names: strings, each by itself. ``example``: of what is allowed."""

    def __init__(self, *example: str, or_text: bool = False) -> None:
        self._example = list(example)
        self._or_text = or_text  # in which the shell's rules part them

    def __str__(self) -> str:
        text = f"{shlex.join(self._example)!r}, or " if self._or_text else ""
        return f"{text}a list of strings, {self._example}"

    def check(self, name: str, value: object) -> None:
        """Raise TypeError or ValueError that names the option, the value and what is allowed."""
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        for word in value:
            if not isinstance(word, str):
                raise TypeError(f"{name}={value!r}: allowed: {self}; {word!r} is none")
        if not value or not value[0]:
            raise ValueError(f"{name}={value!r}: allowed: {self}")


class Amounts:
    """An amount of each of several things."""

    def __str__(self) -> str:
        return "a mapping of names to numbers from 0, {'CPU': 8, 'GPU': 4}, or None"

    def check(self, name: str, value: object) -> None:
        """Raise TypeError or ValueError that names the option, the value and what is allowed."""
        if not isinstance(value, Mapping | None):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        for what, amount in (value or {}).items():
            if not isinstance(what, str) or not isinstance(amount, int | float) or isinstance(amount, bool):
                raise TypeError(f"{name}={value!r}: allowed: {self}")
            if not math.isfinite(amount) or amount < 0:
                raise ValueError(f"{name}={value!r}: allowed: {self}")


class Engine(ABC):
    """To write one, implement ``place``. ``python``: the interpreter on the machines; None: as here.

    Attributes:
        heartbeat_timeout: Seconds after which machines that hear nothing of this process end what runs there and are
            given back: this machine may have lost its power, or a laptop may sleep. None: never. To be set before
            machines are asked for.
    """

    # Of a caller whose machine is cut off no packet tells, so the end of its stream is not enough.
    heartbeat_timeout: float | None = 300.0

    def __init__(self, python: str | None = None) -> None:
        OPTIONAL_NAME.check("python", python)
        self.python = python or sys.executable

    @abstractmethod
    def place(self, machines: int | None, command: Sequence[str]) -> Placement:
        """Ask for machines, on each of which ``command`` is to run; do not wait. None: the engine's own number."""

    def ask_for(self, wanted: int | None, n_gpus: int | None) -> Machines:
        """Return so many machines, which are asked for when they are needed.

        Raises:
            TypeError: One of these, or ``heartbeat_timeout``, is no number.
            ValueError: It is none that is allowed.
        """
        about("keep").allowed.check("heartbeat_timeout", self.heartbeat_timeout)
        about("machines").allowed.check("machines", wanted)
        if not isinstance(n_gpus, str):  # else it is a command's: "auto"
            about("n_gpus").allowed.check("n_gpus", n_gpus)
        return Machines(self.place, self.python, wanted, n_gpus, self.heartbeat_timeout)

    def hold(
        self, machines: int | None = None, n_gpus: int | None = None, *, idle_timeout: float | None = None
    ) -> Cluster:
        """Take machines that stay until ``close()``, for calls with ``engine=`` what this returns.

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
        """Run a function on machines of its own; see ``call_on_machines``."""
        machines = self.ask_for(options.machines, options.n_gpus)
        try:
            return call_on_machines(machines, options, function, args, kwargs)
        finally:
            machines.close()

    def open_session(self, options: Options, rules: StayRules) -> RanksLaunch:
        """Start ranks that stay on machines of their own, which are given back when they end."""
        machines = self.ask_for(options.machines, options.n_gpus)
        try:
            return open_on_machines(machines, options, rules, machines.close)
        except BaseException:
            machines.close()
            raise
