"""Machines of a launch that are there: what they are asked, and what is known of one that has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mlaunch.base.exceptions import LaunchError, LaunchTimeout
from mlaunch.caller import interrupts
from mlaunch.engines.caller.launch.machine import Machine, last_lines
from mlaunch.engines.caller.placement import Placement
from mlaunch.engines.wire.frame_codes import NoiseError
from mlaunch.engines.wire.member_messages import AskOffer, Listen, MemberAnswer, NotPrepared, Offer, Reach

Question = AskOffer | Listen | Reach
_LAST_WORDS_TIMEOUT = 2.0  # seconds for what a member that has ended wrote


class PlacedMachines:
    """``n_gpus``: ranks on each, where a call does not say it; ``lease``: the engine's."""

    def __init__(self, n_gpus: int | None, lease: float | None) -> None:
        self.n_gpus, self.lease = n_gpus, lease
        self.placement: Placement | None = None
        self.meets_at = ""  # the address of the first that all others reach, once they have tried
        self.machines: list[Machine] = []

    @property
    def hosts(self) -> list[str]:
        """Their names, in the order of their ranks; [] before they are there, and after."""
        return [machine.host for machine in self.machines]

    def open(self, timeout: float, tell: Callable[[str], None] = lambda _: None) -> None:
        """Waits until the machines are there; see ``Machines``."""

    def renew(self) -> None:
        """Sees to it that ``open`` gets others, where that is possible, if one of them is lost."""

    def preempted(self) -> bool:
        """Tells whether the engine has taken them for somebody else, or is about to, and would give others."""
        return False

    def kill(self) -> None:
        """Ends all that runs on them."""
        for machine in self.machines:
            machine.lost = True
            machine.stream.hang_up()

    def close(self) -> None:
        """Gives them back, if they are this launch's own."""

    def prepare(self, order: AskOffer, timeout: float) -> None:
        """Asks all machines what they can give to a launch, which they must say within ``timeout`` seconds.

        Raises:
            LaunchError: A machine cannot give it, or has ended.
        """
        for machine in self.machines:
            machine.prepared = None
        self.ask(self.machines, order, timeout)
        start = 0
        for place, machine in enumerate(self.machines):
            machine.place, machine.rank_start = place, start
            start += len(machine.ranks)

    def ask(self, machines: Sequence[Machine], question: Question, timeout: float) -> list[Any]:
        """Returns what these answer, which they must do within ``timeout`` seconds; LaunchError as for ``prepare``."""
        for machine in machines:
            asked = self._for(machine, question) if isinstance(question, AskOffer) else question
            machine.ask(asked)
        waiting, until = list(machines), time.monotonic() + timeout
        while waiting:
            for machine in waiting:
                self._hear(machine)  # also what came with its first word, which is none of its own
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
                continue  # an answer for a call that was given up before it came
            if isinstance(record, NotPrepared):
                raise LaunchError(f"host {machine.host} cannot take part: {record.text}")
            if isinstance(record, Offer):
                machine.prepared = record
                machine.shift = time.monotonic() - record.clock
            machine.answer = record

    def end_of(self, machine: Machine) -> tuple[str, str]:
        """Returns what the engine says of a member that has ended, and what that wrote last."""
        # The stream ends before standard error does: srun and ssh say why only then.
        until = time.monotonic() + _LAST_WORDS_TIMEOUT
        fate = self.placement.fate(machine.number) if self.placement is not None else ""
        writer = next((one for one in (machine, *self.machines) if one.writes_here), machine)
        while writer.stderr >= 0 and time.monotonic() < until:
            interrupts.wait_readable([writer.stderr], until - time.monotonic())
            writer.hear_stderr()
        return fate, writer.last_words()

    def wait(self, machines: Sequence[Machine], until: float, timeout: float) -> None:
        """Waits until one has said something, by then; ``timeout``: seconds of all. Keeps their standard error."""
        errors = {machine.stderr: machine for machine in machines if machine.stderr >= 0}
        fds = [*(machine.stream.fileno() for machine in machines), *errors]
        left = until - time.monotonic()  # of one that prints without end something can always be read
        ready = interrupts.wait_readable(fds, left) if left > 0 else []
        if not ready:
            for machine in machines:
                machine.lost = True  # for a call later on, too
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
