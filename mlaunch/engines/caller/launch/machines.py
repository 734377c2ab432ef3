"""The machines of a call: asked for, greeted, asked what they can give, and given back."""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections.abc import Callable, Sequence

from mlaunch.base.exceptions import LaunchError, LaunchTimeout
from mlaunch.caller import interrupts
from mlaunch.engines.caller.launch.machine import Machine, advice
from mlaunch.engines.caller.launch.placed_machines import PlacedMachines, strange
from mlaunch.engines.caller.lease import Renewal
from mlaunch.engines.caller.placement import Placement
from mlaunch.engines.wire.frame_codes import NoiseError
from mlaunch.engines.wire.member_messages import Lease, command_of

_LOOK_DELAY = 0.1  # seconds between questions to the engine


class Machines(PlacedMachines):
    """``place``: an engine's; ``python``: the interpreter there; ``wanted``: how many, None: as the engine has it;
    ``n_gpus``: ranks on each, where a call does not say it; ``lease``: the engine's."""

    def __init__(
        self,
        place: Callable[[int | None, Sequence[str]], Placement],
        python: str,
        wanted: int | None,
        n_gpus: int | None,
        lease: float | None,
    ) -> None:
        super().__init__(n_gpus, lease)
        self._place, self._python, self._wanted = place, python, wanted
        self._renewal: Renewal | None = None
        self._leaving = False  # they are being given back

    def open(self, timeout: float, tell: Callable[[str], None] = lambda _: None) -> None:
        """Waits until the machines are there, unless they are, however long a queue takes.

        ``timeout``: seconds in which all members must have started then. ``tell``: gets what the machines wait for,
        when that changes.

        Raises:
            LaunchError: They do not come, or mlaunch cannot run there.
        """
        self.renew()
        if self.machines:
            return
        # Before anything is asked for: an exit while a queue is waited for must give the job back as well.
        atexit.register(self.close)
        try:
            self._open(timeout, tell)
        except BaseException:
            self._give_back()
            raise

    def _open(self, timeout: float, tell: Callable[[str], None]) -> None:
        patience = None if self.lease is None else self.lease + timeout  # it hears of the lease when all are there
        self.placement = placement = self._place(self._wanted, command_of(self._python, patience))
        _wait_for(placement, timeout, tell)
        self._start_members(placement, timeout)

    def _start_members(self, placement: Placement, timeout: float) -> None:
        size = len(placement.sizes)
        waiting, until = list[Machine](), time.monotonic() + timeout
        while waiting or len(self.machines) < size:
            while len(self.machines) < size and len(waiting) < (placement.at_once or size):
                number = len(self.machines)
                self.machines.append(Machine(number, placement.start(number)))
                waiting.append(self.machines[-1])
            self.wait(waiting, until, timeout)
            waiting = [machine for machine in waiting if not self._greeted(machine)]
        if self.lease is not None:
            record = Lease(self.lease, tuple(placement.farewell))
            self._renewal = Renewal([machine.stream for machine in self.machines], record)

    def _greeted(self, machine: Machine) -> bool:
        try:
            return machine.greet()
        except EOFError:
            raise LaunchError(self._why_not(machine)) from None
        except NoiseError as error:
            raise strange(machine, error) from None

    def _why_not(self, machine: Machine) -> str:
        """Says why a member did not start."""
        fate, words = self.end_of(machine)
        name = machine.host or f"machine {machine.number}"
        lines = [f"mlaunch did not start on {name}" + (f": {fate}" if fate else "")]
        lines += [f"  {line}" for line in words.splitlines()]
        return "\n".join([*lines, *advice(self._python, fate, words)])

    def renew(self) -> None:
        """Gives the machines back if one of them is lost, so that ``open`` gets others."""
        if self._leaving or any(machine.lost for machine in self.machines):
            self._give_back()

    def preempted(self) -> bool:
        """Tells whether the engine has taken them for somebody else, or is about to, and would give others."""
        return self.placement is not None and self.placement.preempted()

    def kill(self) -> None:
        """Ends all that runs on them."""
        if self.placement is not None:
            self.placement.cancel()
        self.placement = None

    def close(self) -> None:
        """Gives them back. May be called again, also after it was interrupted; ``open`` gets others."""
        self._give_back()

    def _give_back(self) -> None:
        """Forgets each only when that is done, lest an interrupt leave it with nobody."""
        self._leaving = True
        if self._renewal is not None:
            self._renewal.close()
        for machine in self.machines:
            machine.close()
        if self.placement is not None:
            self.placement.cancel()
        self.machines, self.placement, self._renewal, self.meets_at = [], None, None, ""
        self._leaving = False
        atexit.unregister(self.close)


def _wait_for(placement: Placement, timeout: float, tell: Callable[[str], None]) -> None:
    """Waits until the machines are there: for ``timeout`` seconds at most where they are not in a queue."""
    told, until = "", math.inf
    while state := placement.state():
        if state != told:
            tell(state)
        until = math.inf if placement.queues else min(until, time.monotonic() + timeout)
        if time.monotonic() >= until:
            raise LaunchTimeout(
                f"the machines have not come within join_timeout={timeout:g} s: {state}. Is something stopped there, "
                f"or does it ask for input?"
            )
        told = state
        interrupts.wait_readable([], _LOOK_DELAY)  # a sleep that Ctrl-C ends at once


def say(text: str) -> None:
    """Tells people what a call waits for."""
    print(f"mlaunch: {text}", file=sys.stderr, flush=True)
