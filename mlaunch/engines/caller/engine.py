"""The base class of engines. An engine starts a process on each machine and reports its end; launches do the rest."""

from __future__ import annotations

import math
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlaunch.caller.options.launch_options import Options, about
from mlaunch.caller.options.option_values import Name
from mlaunch.engines.caller.cluster import Cluster
from mlaunch.engines.caller.engine_launch import call_on_machines
from mlaunch.engines.caller.kept_launch import open_on_machines
from mlaunch.engines.caller.machines import Machines, say
from mlaunch.engines.caller.placement import Placement
from mlaunch.ranks.caller.ranks_launch import RanksLaunch, StayRules

if TYPE_CHECKING:
    from mlaunch.caller.launch.settle import Ended


OPTIONAL_NAME = Name(optional=True)


class Words:
    """The allowed values of an option that takes a list of strings. ``example``: an allowed list."""

    def __init__(self, *example: str, or_text: bool = False) -> None:
        self._example = list(example)
        self._or_text = or_text  # split by the shell's rules

    def __str__(self) -> str:
        text = f"{shlex.join(self._example)!r}, or " if self._or_text else ""
        return f"{text}a list of strings, {self._example}"

    def check(self, name: str, value: object) -> None:
        """Raise TypeError or ValueError if the value is not allowed. The error names the option and what is allowed."""
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        for word in value:
            if not isinstance(word, str):
                raise TypeError(f"{name}={value!r}: allowed: {self}; {word!r} is none")
        if not value or not value[0]:
            raise ValueError(f"{name}={value!r}: allowed: {self}")


class Amounts:
    """The allowed values of an option that maps names to amounts."""

    def __str__(self) -> str:
        return "a mapping of names to numbers from 0, {'CPU': 8, 'GPU': 4}, or None"

    def check(self, name: str, value: object) -> None:
        """Raise TypeError or ValueError if the value is not allowed. The error names the option and what is allowed."""
        if not isinstance(value, Mapping | None):
            raise TypeError(f"{name}={value!r}: allowed: {self}")
        for what, amount in (value or {}).items():
            if not isinstance(what, str) or not isinstance(amount, int | float) or isinstance(amount, bool):
                raise TypeError(f"{name}={value!r}: allowed: {self}")
            if not math.isfinite(amount) or amount < 0:
                raise ValueError(f"{name}={value!r}: allowed: {self}")


class Engine(ABC):
    """The base class of engines: implement ``place``. ``python``: the interpreter on the machines; None: as here.

    Attributes:
        heartbeat_timeout: Seconds after which machines that receive nothing from this process end what runs there and
            are given back: this machine may have lost its power, or a laptop may sleep. None: never. Set it before
            machines are asked for.
    """

    # A caller whose machine is cut off sends no packet, so its stream does not end.
    heartbeat_timeout: float | None = 300.0

    def __init__(self, python: str | None = None) -> None:
        OPTIONAL_NAME.check("python", python)
        self.python = python or sys.executable

    @abstractmethod
    def place(self, machines: int | None, command: Sequence[str]) -> Placement:
        """Ask for machines that run ``command``; do not wait for them. ``machines``: None: the engine's own number."""

    def ask_for(self, wanted: int | None, n_gpus: int | None) -> Machines:
        """Return ``wanted`` machines, which the engine is asked for when they are needed.

        Raises:
            TypeError: An argument, or ``heartbeat_timeout``, is not a number.
            ValueError: The number is not allowed.
        """
        about("keep").allowed.check("heartbeat_timeout", self.heartbeat_timeout)
        about("machines").allowed.check("machines", wanted)
        if not isinstance(n_gpus, str):  # else it is a command's: "auto"
            about("n_gpus").allowed.check("n_gpus", n_gpus)
        return Machines(self.place, self.python, wanted, n_gpus, self.heartbeat_timeout)

    def hold(
        self, machines: int | None = None, n_gpus: int | None = None, *, idle_timeout: float | None = None
    ) -> Cluster:
        """Take machines that stay until ``close()``. Pass what this returns as ``engine=`` to calls.

        Waits until the machines are there, and prints why it waits. ``n_gpus``: ranks on each, for calls that do not
        say it. ``idle_timeout``: seconds without a call after which the machines are given back. They are also given
        back when this process ends, however it ends.

        Raises:
            LaunchError: The engine does not give the machines, or mlaunch cannot run there.
            TypeError: An argument is not a number.
            ValueError: The number is not allowed.
        """
        about("keep").allowed.check("idle_timeout", idle_timeout)
        held = self.ask_for(machines, n_gpus)
        held.open(Options().join_timeout, lambda state: say(f"hold() waits: {state}"))
        return Cluster(held, idle_timeout)

    def call(
        self, options: Options, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Ended:
        """Run a function on machines that are taken for this call; see ``call_on_machines``."""
        machines = self.ask_for(options.machines, options.n_gpus)
        try:
            return call_on_machines(machines, options, function, args, kwargs)
        finally:
            machines.close()

    def open_session(self, options: Options, rules: StayRules) -> RanksLaunch:
        """Start ranks that stay, on machines that are given back when the ranks end."""
        machines = self.ask_for(options.machines, options.n_gpus)
        try:
            return open_on_machines(machines, options, rules, machines.close)
        except BaseException:
            machines.close()
            raise
