"""The agents of all machines, merged into one for the launch's handle, which then works as for a launch here. ::

members --frames--> this thread --records, descriptors--> channel --> LaunchHandle, as of an agent on this machine
  values -> memfds   what ranks print -> pipes   rows of boards -> one board   times -> this machine's clock
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlaunch.agreed_stop.wire import NAME, AskToStop
from mlaunch.base.exceptions import RankFailure, describe_exit
from mlaunch.base.fds import close_all, ready
from mlaunch.engines.caller.launch.machine import Machine, last_lines
from mlaunch.engines.caller.launch.machines_inspection import MachinesInspection
from mlaunch.engines.caller.launch.machines_stop import MachinesStop
from mlaunch.engines.caller.launch.output_pipes import Backlog
from mlaunch.engines.caller.launch.timeouts import EndOf, Patience
from mlaunch.engines.wire.frame_stream import NoiseError
from mlaunch.engines.wire.member_messages import (
    Alive,
    FromAgent,
    MachineDone,
    MemberAnswer,
    Printed,
    Reports,
    Rows,
    ServerEnded,
)
from mlaunch.protocol import failures
from mlaunch.protocol.board import Board
from mlaunch.protocol.channel import Channel, assert_never
from mlaunch.protocol.messages import (
    AgentFailed,
    Cancel,
    DeadlinePassed,
    Finished,
    ForPart,
    PartSays,
    RankGone,
    RanksStarting,
    RankStarted,
    Reaped,
    Refused,
    Told,
    Waiting,
)

if TYPE_CHECKING:
    from mlaunch.core.load import CallerParts
    from mlaunch.engines.wire.member_streams import MemberHears, MemberSays
    from mlaunch.protocol.messages import AgentHears, AgentSays, LaunchersEnd


class MergedAgent:
    """The agents of all machines as one. ``end_of``: returns why a machine was lost, and what its member wrote last."""

    def __init__(
        self,
        machines: Sequence[Machine],
        world_size: int,
        end_of: EndOf,
        times: Patience,
        inspection: MachinesInspection,
    ) -> None:
        self.channel: LaunchersEnd
        self.channel, self._theirs = Channel.pair()
        self._machines = machines
        self._world_size = world_size
        self._end_of, self._times, self.inspection = end_of, times, inspection
        self._open = {machine.stream.fileno(): machine for machine in machines}
        self.parts: CallerParts | None = None  # of the call's features
        self._stop = MachinesStop(self._open, self._tell, inspection)
        self._board = Board.create(world_size)
        self._backlog = Backlog()
        self._nothing = os.memfd_create("mlaunch-nothing", os.MFD_CLOEXEC)  # sent with a rank that did not crash
        self._started = self._refused = self._lost = False  # _lost: some machine, or a process there
        self._abandoned = False  # the launch's handle has closed its channel
        self._second_hand: RankFailure | None = None  # other machines' report of a lost one; its own is preferred
        self._thread = threading.Thread(target=self._run, name="mlaunch-engine", daemon=True)

    def start(self) -> None:
        """Start the thread that listens to the machines. They belong to it until ``join``."""
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end; True if it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.inspection.open()
            while self._open and not self._abandoned:
                self._step()
        except Exception as error:  # a bug: the handle must not wait for ever
            self._tell(AgentFailed(f"{type(error).__name__}: {error}"))
        finally:
            for machine in self._open.values():
                machine.lost = True
            self.inspection.close()
            if self._second_hand is not None and not self._lost:
                self._tell(self._second_hand)
            self._tell(Finished())
            self._backlog.see_out(range(self._world_size), self._theirs.fileno(), self._hear_handle)
            self._theirs.close()
            self._board.close()
            os.close(self._nothing)

    def _step(self) -> None:
        events = self._wait()
        gives_up, passed = self._times.take_due()
        if gives_up:
            self._give_up()
        if passed:
            self._backlog.limit = None
        for news in self._times.news(self._open.values(), self._end_of):
            self._tell(news)
        self._backlog.flush()
        for machine in self._machines:
            if machine.stderr in events:
                machine.hear_stderr()
            if machine.stream.outgoing in events:
                machine.stream.flush()
        for fd in events & self._open.keys():
            self._hear(fd, self._open[fd])
        self.inspection.serve(events, list(self._open.values()))
        if (ended_by := self._stop.serve()) is not None and not self._lost:
            self._fail(failures.from_stop(ended_by))
            self._cancel()
        if self._theirs.fileno() in events:
            self._hear_handle()

    def _wait(self) -> set[int]:
        readers = [self._theirs.fileno(), *self.inspection.fds(), *(() if self._backlog.full else self._open)]
        readers += [machine.stderr for machine in self._machines if machine.stderr >= 0]
        writers = [machine.stream.outgoing for machine in self._machines if machine.stream.unsent]
        writers += self._backlog.blocked()
        return ready(readers, writers, self._times.milliseconds(min(self.inspection.due, self._stop.due)))

    def _cancel(self) -> None:
        """Ask all machines to end the launch."""
        self._send(Cancel())

    def _hear_handle(self) -> bool:
        """Do what the handle asks for; False if the handle is gone."""
        record, fds = self._theirs.hear()
        if record is None:
            record, self._abandoned = Cancel(force=True), True
        if isinstance(record, ForPart):
            if record.feature == NAME and isinstance(record.word, AskToStop):
                self._stop.ask(record.word.reason, record.call)
        elif not self.inspection.obey(record, list(self._open.values()), self._theirs):
            self._obey(record, fds)
        close_all(fds)
        return not self._abandoned

    def _obey(self, record: AgentHears, _fds: Sequence[int]) -> None:
        self._backlog.limit = None
        if isinstance(record, Cancel):  # the only request to a launch of one call
            self._send(record)

    def _send(self, record: MemberHears, content: int = -1, *, but: Machine | None = None) -> None:
        """Send a record to all machines that have not ended, except ``but``."""
        for machine in self._open.values():
            if machine is not but:
                machine.stream.send(record, content)

    def _hear(self, fd: int, machine: Machine) -> None:
        try:
            for record, content in machine.stream.receive():
                self._take(machine, record, content)
                close_all([content] if content >= 0 else [])
                if isinstance(record, MachineDone):
                    del self._open[fd]
        except (NoiseError, EOFError) as error:
            del self._open[fd]
            self._lose(machine, f"was lost: the host {error}{error.hint}" if isinstance(error, NoiseError) else "")

    def _lose(self, machine: Machine, what: str = "") -> None:
        """Report that a machine is gone, and end the launch on the others."""
        machine.lost = True
        fate, words = self._end_of(machine) if not what else ("", "")
        what = what or f"was lost: {fate or 'its member has ended'}"
        hints = tuple(f"it wrote: {line}" for line in last_lines(words))
        self._fail(_lost(what, machine, f"host {machine.host}", hints))
        self._backlog.end(machine.ranks)
        self._send(Cancel())

    def _fail(self, failure: RankFailure) -> None:
        self._lost = True
        self._tell(failure)

    def _hear_part(self, record: PartSays) -> None:
        if self.parts is not None:
            self.parts.heard(record.feature, record.news)

    def _take(self, machine: Machine, record: MemberSays, content: int) -> None:
        if isinstance(record, Printed):
            self._backlog.add(record.rank, record.stream, record.data)
        elif isinstance(record, Rows | Reports):
            machine.note_on(self._board, record)
        elif isinstance(record, FromAgent):
            self._take_from_agent(machine, record.record, content)
        elif isinstance(record, PartSays):
            self._hear_part(record)
        elif isinstance(record, ServerEnded):
            self._fail(_lost(record.what, machine, "the fork server"))
            self._send(Cancel(), but=machine)
        elif isinstance(record, MachineDone):
            if record.error:
                self._refuse(f"host {machine.host}: {record.error}", late=record.late)
        elif not isinstance(record, Alive | MemberAnswer):  # MemberAnswer: an answer that came too late
            assert_never(record)

    def _take_from_agent(self, machine: Machine, record: AgentSays, content: int) -> None:
        if isinstance(record, RanksStarting):
            if not self._started:  # reported once, as the start of all ranks
                self._started = True
                known_as = self.inspection.launch.launch_id  # under which ``mlaunch ps`` here shows it
                self._tell(RanksStarting(time.monotonic(), known_as, 0, self._world_size), [self._board.fd])
        elif isinstance(record, RankStarted):
            readers = self._backlog.open(record.rank, (1, 2))
            self._tell(machine.shifted(dataclasses.replace(record, channels=0)), readers)
            close_all(readers)
        elif isinstance(record, Reaped):
            if record.exitcode != 0:
                who = f"the agent on host {machine.host}"
                self._fail(_lost(describe_exit(record.exitcode), machine, who))
                self._send(Cancel(), but=machine)  # machines that still join would wait for this one
        elif isinstance(record, Refused):
            self._refuse(record.text, late=record.late)
        elif isinstance(record, RankFailure):
            self._take_peers_failure(machine, record)
        elif not self._answers(machine, record, content) and (machine.place == 0 or not isinstance(record, Waiting)):
            nothing = [self._nothing] if isinstance(record, RankGone) else []
            self._tell(machine.shifted(record), [content] if content >= 0 else nothing)

    def _answers(self, machine: Machine, record: AgentSays, content: int) -> bool:
        """Handle a record that answers a question of this thread's; False if it is another one, for the handle."""
        if isinstance(record, Told):
            self.inspection.take(machine, record.number, content)
            return True
        return isinstance(record, PartSays) and record.feature == NAME and self._stop.take(machine, record.news)

    def _take_peers_failure(self, machine: Machine, record: RankFailure) -> None:
        """Note a machine's report about another one. Reports about ranks are dropped: their own member's says more."""
        if record.late:
            self._tell(DeadlinePassed())
        if record.rank is None and self._second_hand is None:
            self._second_hand = record if record.host else dataclasses.replace(record, host=machine.host)
            self._times.begin_to_give_up()

    def _give_up(self) -> None:
        """Give up the machines that have not ended, after one was reported lost that may never report it itself."""
        if self._second_hand is not None and self._open:
            silent = f"nothing more came from host {', '.join(machine.host for machine in self._open.values())}"
            self._second_hand = dataclasses.replace(self._second_hand, hints=(*self._second_hand.hints, silent))
        for machine in self._open.values():
            machine.lost = True
            self._backlog.end(machine.ranks)
        self._open.clear()

    def _refuse(self, text: str, *, late: bool = False) -> None:
        if not self._refused:
            self._refused = True
            self._tell(Refused(text, late))
        self._send(Cancel())

    def _tell(self, record: AgentSays, fds: Sequence[int] = ()) -> None:
        self._theirs.try_send(record, fds)


def _lost(what: str, machine: Machine, who: str, hints: tuple[str, ...] = ()) -> RankFailure:
    return RankFailure(None, 0, what, host=machine.host, subject=who, hints=hints, kind="lost")
