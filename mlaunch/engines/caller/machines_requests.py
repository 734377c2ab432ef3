"""Requests to a launch on other machines that come to its caller: ``mlaunch ps``, ``why``, ``stacks`` and ``stop``."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlaunch.agreed_stop.wire import (
    NAME,
    AgreedStop,
    AskToStop,
    FreezeRanks,
    RanksFrozen,
    StopAgreed,
    StopRanks,
    ThawRanks,
    is_check_count,
    terms_of,
)
from mlaunch.base.fds import close_in_forks
from mlaunch.base.linux import working_directory
from mlaunch.base.text import printable
from mlaunch.engines.caller.machines import Machine
from mlaunch.protocol import registry
from mlaunch.protocol.messages import AgentHears, AgentSays, AgentsEnd, ForPart, PartSays, Question
from mlaunch.protocol.registry import Reception, answer, tell_launcher
from mlaunch.protocol.spec import LaunchSpec

_ID_SHOWN = 8
_REASON = 100  # bytes of the reason for a stop
_PATIENCE = 3.0  # seconds for the machines to answer: ``mlaunch ps`` waits for five


@dataclass
class _Asked:
    tell: Callable[[Mapping[str, Any]], None]
    due: float  # when to answer with what has come, in monotonic seconds
    missing: set[int]  # numbers of the machines that have not answered
    found: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # the ranks of the machines that have
    features: Mapping[str, Any] = field(default_factory=dict)  # the first machine's answers


class MachinesInspection:
    """The answers of one launch about itself, from its machines' agents.

    They belong to the thread that listens to the machines.
    """

    def __init__(self, spec: LaunchSpec, machines: Sequence[Machine]) -> None:
        self.launch = spec
        self._machines = machines
        self._start = time.monotonic()
        self._questions: dict[int, _Asked] = {}
        self._asked = 0
        self._cwd = working_directory()
        self._environ = dict(os.environ)
        self._reception = Reception(self._environ, spec.launch_id)

    def open(self) -> None:
        """Register the launch, so that ``mlaunch ps`` finds it, and remove entries of callers that were killed."""
        with contextlib.suppress(OSError):  # the directory belongs to another user; a launch can do without
            for _, connection in registry.connections(self._environ):
                connection.close()
        self._reception.open()
        # A fork of the caller would keep the launch listed after its end.
        close_in_forks(self._reception)

    @property
    def due(self) -> float:
        """The time at which to call ``serve`` though nothing has come, in monotonic seconds."""
        return min((question.due for question in self._questions.values()), default=math.inf)

    @property
    def stopped_by(self) -> int | None:
        """The process that has asked for the launch's end; None if none has."""
        return self._reception.stopped_by

    def take_request(self) -> int | None:
        """Return, once, the process that asks for a stop at a step that the ranks agree on; None if none does."""
        request = self._reception.take_request()
        return request[1] if request is not None and request[0] == NAME else None

    def end_request(self) -> None:
        """Tell the processes that asked for the stop of a call on ranks that stay that the call is over."""
        self._reception.let_stoppers_go()

    def fds(self) -> list[int]:
        """Return the descriptors to wait for."""
        return self._reception.fds()

    def serve(self, ready: Collection[int], there: Sequence[Machine]) -> None:
        """Pass visitors' questions to the machines that are ``there``; answer those that have waited too long."""
        for visitor, word in self._reception.take(ready):
            self.ask(word, there, functools.partial(answer, visitor))
        for visitor, _, _ in self._reception.take_guests():  # debuggers
            answer(visitor, {"refused": self._no_debugger()})
        for number in [number for number, one in self._questions.items() if time.monotonic() >= one.due]:
            self._finish(number)

    def _no_debugger(self) -> str:
        """Return in words why ranks cannot be debugged from here."""
        hosts = ", ".join(sorted({machine.host for machine in self._machines}))
        return (
            f"the ranks of {self.launch.call.name} were started by an engine on {hosts}, which mlaunch debug does not "
            f"reach from here. Run it on the rank's machine: mlaunch debug {self.launch.launch_id[:_ID_SHOWN]} RANK"
        )

    def obey(self, record: AgentHears, there: Sequence[Machine], launcher: AgentsEnd) -> bool:
        """Answer a question of the launch's handle; False if the record is another one."""
        if isinstance(record, Question) and isinstance(record.about, bytes):
            self.ask(record.about, there, functools.partial(tell_launcher, launcher, record.number))
        return isinstance(record, Question)

    def ask(self, word: bytes, there: Sequence[Machine], tell: Callable[[Mapping[str, Any]], None]) -> None:
        """Ask the machines that are ``there``; ``tell`` receives the status of all."""
        self._asked += 1
        numbers = {machine.number for machine in there}
        self._questions[self._asked] = _Asked(tell, time.monotonic() + _PATIENCE, numbers)
        for machine in there:
            machine.stream.send(Question(self._asked, word))

    def take(self, machine: Machine, number: int, content: int) -> None:
        """Receive a machine's answer. ``content``: a file with its status in JSON; -1: none."""
        question = self._questions.get(number)
        if question is None:  # the answer came too late
            return
        question.missing.discard(machine.number)
        if content >= 0:
            with open(os.dup(content), encoding="utf-8") as file, contextlib.suppress(ValueError):  # the file was cut
                file.seek(0)
                status = json.load(file)
                question.found[machine.number] = status["ranks"]
                if machine.place == 0:
                    question.features = status.get("features", {})
        if not question.missing:
            self._finish(number)

    def close(self) -> None:
        """Answer the visitors that still wait, and remove the launch from the registry."""
        for number in list(self._questions):
            self._finish(number)
        self._reception.close()

    def _finish(self, number: int) -> None:
        question = self._questions.pop(number)
        question.tell(self._status(question))

    def _status(self, question: _Asked) -> dict[str, Any]:
        ranks = []
        for machine in self._machines:
            known = question.found.get(machine.number) or [self._unknown(rank, machine) for rank in machine.ranks]
            ranks += [{**rank, "host": machine.host} for rank in known]
        return {
            "id": self.launch.launch_id,
            "function": self.launch.call.name,
            "age": round(time.monotonic() - self._start, 3),
            "caller": os.getpid(),
            "agent": os.getpid(),
            "cwd": self._cwd,
            "argv": list(self.launch.context.argv),
            "source": self.launch.context.source,
            "world_size": self.launch.world_size,
            "restart_count": self.launch.restarts.count,
            "features": question.features,
            "ranks": ranks,
        }

    def _unknown(self, rank: int, machine: Machine) -> dict[str, Any]:
        state = "its machine is lost" if machine.lost else "its machine has not said what it does"
        return {"rank": rank, "pid": 0, "device": "-", "state": state, "stacks": "", "frames": []}


class MachinesStop:
    """The agreement of a launch's machines on the step at which all of their ranks stop.

    Each machine's agent freezes, reminds and at last ends its own ranks. ``there``: the machines that have not ended,
    by descriptor; ``tell``: sends a record to the launch's handle; ``inspection``: receives the requests of ``mlaunch
    stop``.
    """

    def __init__(
        self, there: Mapping[int, Machine], tell: Callable[[AgentSays], None], inspection: MachinesInspection
    ) -> None:
        self._there = there
        self._tell = tell
        self._inspection = inspection
        self._terms = terms_of(inspection.launch.sections)
        self._agreed: AgreedStop | None = None
        self._call, self._reason, self._asked = 0, "", 0.0

    def begin_call(self, call: int) -> None:
        """Note the start of a call on ranks that stay."""
        self._call, self._agreed = call, None

    def end_call(self) -> None:
        """Tell the processes that asked for the call's stop that it is over."""
        self._inspection.end_request()
        self._agreed = None

    def ask(self, reason: str, call: int, by: int | None = None) -> None:
        """Begin to agree on a step. A second request changes nothing. ``by``: see ``AgreedStop.asked_by``."""
        if self._agreed is None and call == self._call:
            self._reason, self._asked = reason, time.time()
            self._agreed = AgreedStop(self, time.monotonic, by)
            self._agreed.begin(self._terms.grace / 2)

    def serve(self) -> int | None:
        """Handle requests of ``mlaunch stop``, and take the steps of the agreement that are due.

        Returns:
            The process that wants the launch to end at once, or whose request no rank would notice; None if there is
            none.
        """
        if (asked_by := self._inspection.take_request()) is not None:
            self.ask("asked", self._call, None if self._terms.expected else asked_by)
        agreed = self._agreed
        if agreed is not None and agreed.take_steps() and agreed.check is not None:
            self._tell(PartSays(NAME, StopAgreed(self._reason, self._asked, agreed.check)))
        unused_by = agreed.asked_by if agreed is not None and agreed.unused else None
        return unused_by if self._inspection.stopped_by is None else self._inspection.stopped_by

    def take(self, machine: Machine, news: object) -> bool:
        """Handle news of a machine: its ranks wait, or a signal has come there that asks all ranks to stop.

        Returns:
            False if the news is for the launch's handle.
        """
        if isinstance(news, AskToStop):
            self.ask(printable(news.reason, _REASON), self._call)
        elif not isinstance(news, RanksFrozen):
            return False
        elif self._agreed is not None and news.call == self._call and is_check_count(news.checks):
            self._agreed.freeze.take(machine.number, news.checks)
        return True

    @property
    def due(self) -> float:
        return float("inf") if self._agreed is None else self._agreed.due

    # The machines as members

    def working(self) -> Collection[int]:
        return [machine.number for machine in self._there.values()]

    def freeze(self, member: int) -> None:
        self._send(member, FreezeRanks(self._reason))

    def thaw(self, member: int) -> None:
        self._send(member, ThawRanks())

    def stop_at(self, member: int, check: int) -> None:
        self._send(member, StopRanks(check, self._reason))

    def _send(self, member: int, word: FreezeRanks | ThawRanks | StopRanks) -> None:
        for machine in self._there.values():
            if machine.number == member:
                machine.stream.send(ForPart(NAME, self._call, word))
