"""The machines of a call, from the request for them until they are given back."""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mlaunch.base.exceptions import LaunchError, LaunchTimeout
from mlaunch.caller import interrupts
from mlaunch.engines.caller.launch.machine import Machine, advice, last_lines
from mlaunch.engines.caller.launch.timeouts import Heartbeats
from mlaunch.engines.caller.placement import Placement
from mlaunch.engines.wire.frame_stream import NoiseError
from mlaunch.engines.wire.member_messages import (
    AskOffer,
    Heartbeat,
    Listen,
    MemberAnswer,
    NotPrepared,
    Offer,
    Reach,
    command_of,
)

MemberQuestion = AskOffer | Listen | Reach
_LAST_WORDS_TIMEOUT = 2.0  # seconds to read what a member that has ended wrote
_LOOK_DELAY = 0.1  # seconds between queries to the engine


class PlacedMachines:
    """The machines of a launch, which another object may hold. Asks them questions, and finds out why one has ended.

    ``n_gpus``: ranks on each, if a call does not say it; ``heartbeat_timeout``: the engine's.
    """

    def __init__(self, n_gpus: int | None, heartbeat_timeout: float | None) -> None:
        self.n_gpus, self.heartbeat_timeout = n_gpus, heartbeat_timeout
        self.placement: Placement | None = None
        self.meets_at = ""  # the address of the first machine that all others reach, once they have tried
        self.machines: list[Machine] = []

    @property
    def hosts(self) -> list[str]:
        """The names of the machines, in the order of their ranks; [] before they are there, and after."""
        return [machine.host for machine in self.machines]

    def open(self, timeout: float, tell: Callable[[str], None] = lambda _: None) -> None:
        """Wait until the machines are there; see ``Machines``."""

    def renew(self) -> None:
        """If a machine is lost, and others can be had, make the next ``open`` get them."""

    def preempted(self) -> bool:
        """True if the engine has preempted the machines, or is about to, and would give others."""
        return False

    def kill(self) -> None:
        """End all that runs on the machines."""
        for machine in self.machines:
            machine.lost = True
            machine.stream.hang_up()

    def close(self) -> None:
        """Give the machines back, if they are this launch's own."""

    def prepare(self, order: AskOffer, timeout: float) -> None:
        """Ask all machines what they can give to a launch. They must answer within ``timeout`` seconds.

        Raises:
            LaunchError: A machine cannot give what is asked for, or has ended.
        """
        for machine in self.machines:
            machine.prepared = None
        self.ask(self.machines, order, timeout)
        start = 0
        for place, machine in enumerate(self.machines):
            machine.place, machine.rank_start = place, start
            start += len(machine.ranks)

    def ask(self, machines: Sequence[Machine], question: MemberQuestion, timeout: float) -> list[Any]:
        """Return the machines' answers. They must come within ``timeout`` seconds; LaunchError as for ``prepare``."""
        for machine in machines:
            asked = self._for(machine, question) if isinstance(question, AskOffer) else question
            machine.ask(asked)
        waiting, until = list(machines), time.monotonic() + timeout
        while waiting:
            for machine in waiting:
                self._hear(machine)  # data that came with its first line is not signalled again
            waiting = [machine for machine in waiting if machine.answer is None]
            if waiting:
                self.wait(waiting, until, timeout)
        return [machine.answer for machine in machines]

    def _for(self, machine: Machine, order: AskOffer) -> AskOffer:
        size = self.placement.sizes[machine.number] if self.placement is not None else None
        given = size or order.options.get("n_gpus") or self.n_gpus
        return replace(order, options={**order.options, "n_gpus": given})

    def _hear(self, machine: Machine) -> None:
        try:
            found = machine.stream.receive()
        except NoiseError as error:
            machine.lost = True
            raise strange(machine, error) from None
        except EOFError:
            machine.lost = True
            fate, words = self.end_of(machine)
            wrote = "".join(f"\n  it wrote: {line}" for line in last_lines(words))
            raise LaunchError(f"host {machine.host} was lost: {fate or 'its member has ended'}{wrote}") from None
        for record, _ in found:
            if not isinstance(record, MemberAnswer) or record.number != machine.asked:
                continue  # a late answer, for a call that was given up
            if isinstance(record, NotPrepared):
                raise LaunchError(f"host {machine.host} cannot take part: {record.text}")
            if isinstance(record, Offer):
                machine.prepared = record
                machine.shift = time.monotonic() - record.clock
            machine.answer = record

    def end_of(self, machine: Machine) -> tuple[str, str]:
        """Return why a member has ended, in the engine's words, and what the member wrote last."""
        # srun and ssh print the reason only after the stream has ended.
        until = time.monotonic() + _LAST_WORDS_TIMEOUT
        fate = self.placement.fate(machine.number) if self.placement is not None else ""
        writer = next((one for one in (machine, *self.machines) if one.writes_here), machine)
        while writer.stderr >= 0 and time.monotonic() < until:
            interrupts.wait_readable([writer.stderr], until - time.monotonic())
            writer.hear_stderr()
        return fate, writer.last_words()

    def wait(self, machines: Sequence[Machine], until: float, timeout: float) -> None:
        """Wait until a machine has sent something, or until the time ``until``; read their standard error meanwhile.

        ``timeout``: seconds, for the error's text.
        """
        errors = {machine.stderr: machine for machine in machines if machine.stderr >= 0}
        fds = [*(machine.stream.fileno() for machine in machines), *errors]
        left = until - time.monotonic()  # checked here: a member that prints without end can always be read
        ready = interrupts.wait_readable(fds, left) if left > 0 else []
        if not ready:
            for machine in machines:
                machine.lost = True  # for later calls, too
            names = ", ".join(machine.host or f"machine {machine.number}" for machine in machines)
            words = "\n".join(word for machine in machines if (word := machine.last_words()))
            raise LaunchTimeout(
                f"mlaunch has not answered on {names} within join_timeout={timeout:g} s; is it slow to start there, or "
                f"does something ask for input?" + (words and f" It wrote:\n{words}")
            )
        for fd in ready:
            if fd in errors:
                errors[fd].hear_stderr()


def strange(machine: Machine, error: NoiseError) -> LaunchError:
    who = f"host {machine.host}" if machine.host else f"machine {machine.number}"
    return LaunchError(f"{who} {error}{error.hint}")


class Machines(PlacedMachines):
    """Machines that an engine gives.

    ``place``: the engine's method; ``python``: the interpreter there; ``wanted``: how many machines, None: the
    engine's own number; ``n_gpus``: ranks on each, if a call does not say it; ``heartbeat_timeout``: the engine's.
    """

    def __init__(
        self,
        place: Callable[[int | None, Sequence[str]], Placement],
        python: str,
        wanted: int | None,
        n_gpus: int | None,
        heartbeat_timeout: float | None,
    ) -> None:
        super().__init__(n_gpus, heartbeat_timeout)
        self._place, self._python, self._wanted = place, python, wanted
        self._heartbeats: Heartbeats | None = None
        self._leaving = False  # the machines are being given back

    def open(self, timeout: float, tell: Callable[[str], None] = lambda _: None) -> None:
        """Wait until the machines are there, if they are not yet, however long a queue takes.

        ``timeout``: seconds in which all members must then start. ``tell``: gets what the machines wait for, when
        that changes.

        Raises:
            LaunchError: The machines do not come, or mlaunch cannot run there.
        """
        self.renew()
        if self.machines:
            return
        # Before the request: an exit during the wait for a queue must give the job back, too.
        atexit.register(self.close)
        try:
            self._open(timeout, tell)
        except BaseException:
            self._give_back()
            raise

    def _open(self, timeout: float, tell: Callable[[str], None]) -> None:
        # The caller sends no heartbeat before all members are there.
        patience = None if self.heartbeat_timeout is None else self.heartbeat_timeout + timeout
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
        if self.heartbeat_timeout is not None:
            record = Heartbeat(self.heartbeat_timeout, tuple(placement.farewell))
            self._heartbeats = Heartbeats([machine.stream for machine in self.machines], record)

    def _greeted(self, machine: Machine) -> bool:
        try:
            return machine.greet()
        except EOFError:
            raise LaunchError(self._why_not(machine)) from None
        except NoiseError as error:
            raise strange(machine, error) from None

    def _why_not(self, machine: Machine) -> str:
        """Return in words why a member did not start."""
        fate, words = self.end_of(machine)
        name = machine.host or f"machine {machine.number}"
        lines = [f"mlaunch did not start on {name}" + (f": {fate}" if fate else "")]
        lines += [f"  {line}" for line in words.splitlines()]
        return "\n".join([*lines, *advice(self._python, fate, words)])

    def renew(self) -> None:
        """Give the machines back if one of them is lost; ``open`` then gets others."""
        if self._leaving or any(machine.lost for machine in self.machines):
            self._give_back()

    def preempted(self) -> bool:
        """True if the engine has preempted the machines, or is about to, and would give others."""
        return self.placement is not None and self.placement.preempted()

    def kill(self) -> None:
        """End all that runs on the machines."""
        if self.placement is not None:
            self.placement.cancel()
        self.placement = None

    def close(self) -> None:
        """Give the machines back. May be called again, also after an interrupt; ``open`` then gets others."""
        self._give_back()

    def _give_back(self) -> None:
        """Give the machines back, and forget each only afterwards: after an interrupt, ``close`` must still find it."""
        self._leaving = True
        if self._heartbeats is not None:
            self._heartbeats.close()
        for machine in self.machines:
            machine.close()
        if self.placement is not None:
            self.placement.cancel()
        self.machines, self.placement, self._heartbeats, self.meets_at = [], None, None, ""
        self._leaving = False
        atexit.unregister(self.close)


def _wait_for(placement: Placement, timeout: float, tell: Callable[[str], None]) -> None:
    """Wait until the machines are there: for ``timeout`` seconds at most, unless they are in a queue."""
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
    """Print a message, such as what a call waits for."""
    print(f"mlaunch: {text}", file=sys.stderr, flush=True)
