"""The agents of all machines, merged into one for the launch's handle, which then works as for a launch here.

The time limits of such a launch, and the pipes for what its ranks print, are here, too. ::

members --frames--> this thread --records, descriptors--> channel --> LaunchHandle, as of an agent on this machine
  values -> memfds   what ranks print -> pipes   rows of boards -> one board   times -> this machine's clock
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlaunch.agreed_stop.wire import NAME, AskToStop
from mlaunch.base.exceptions import RankFailure, describe_exit
from mlaunch.base.fds import close_all, ready
from mlaunch.engines.caller.machines import Machine, interval, last_lines
from mlaunch.engines.caller.machines_requests import MachinesInspection, MachinesStop
from mlaunch.engines.wire import (
    Alive,
    FromAgent,
    MachineDone,
    MemberAnswer,
    MemberHears,
    MemberSays,
    Printed,
    Reports,
    Rows,
    ServerEnded,
)
from mlaunch.engines.wire.frame_stream import NoiseError
from mlaunch.protocol import failures
from mlaunch.protocol.board import Board
from mlaunch.protocol.channel import Channel, assert_never
from mlaunch.protocol.messages import (
    AgentFailed,
    AgentHears,
    AgentSays,
    Cancel,
    DeadlinePassed,
    Finished,
    ForPart,
    LaunchersEnd,
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

EndOf = Callable[[Machine], tuple[str, str]]  # why it ended, in the engine's words, and what its member wrote last
# Above it machines and their ranks wait, as a rank here waits at a full pipe.
_LIMIT = 1 << 22  # bytes of output
_MISSED = 2.5  # heartbeats without an answer


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

    def _take(self, machine: Machine, record: MemberSays, content: int) -> None:
        if isinstance(record, Printed):
            self._backlog.add(record.rank, record.stream, record.data)
        elif isinstance(record, Rows | Reports):
            machine.note_on(self._board, record)
        elif isinstance(record, FromAgent):
            self._take_from_agent(machine, record.record, content)
        elif isinstance(record, PartSays):
            if self.parts is not None:
                self.parts.heard(record.feature, record.news)
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


class Patience:
    """The time limits of one launch, in seconds.

    Args:
        patience: How long to wait for a machine that another machine has reported lost.
        deadline: When unread output no longer delays the launch; None: it does until the end.
        heartbeat_timeout: The engine's. It determines how often machines must answer; None: they need not.
    """

    def __init__(self, patience: float, deadline: float | None, heartbeat_timeout: float | None = None) -> None:
        self._patience = patience
        self._give_up_at = math.inf
        self._lift_at = math.inf if deadline is None else time.monotonic() + deadline
        self._silence = math.inf if heartbeat_timeout is None else interval(heartbeat_timeout) * _MISSED
        self._check_at = time.monotonic() + self._silence
        self._silent = set[int]()  # numbers of machines that were reported as silent

    def milliseconds(self, other: float) -> float | None:
        """Return how many milliseconds a poll may take, if something else is due at ``other``; None: no limit."""
        due = min(self._give_up_at, self._lift_at, self._check_at, other)
        return None if due == math.inf else 1000 * max(0.0, due - time.monotonic())

    def begin_to_give_up(self) -> None:
        """Note that a machine was reported lost by another one."""
        self._give_up_at = min(self._give_up_at, time.monotonic() + self._patience)

    def take_due(self) -> tuple[bool, bool]:
        """Return whether to give up now, and whether the deadline has passed; each is True only once."""
        now = time.monotonic()
        gives_up, lifts = now >= self._give_up_at, now >= self._lift_at
        self._give_up_at = math.inf if gives_up else self._give_up_at
        self._lift_at = math.inf if lifts else self._lift_at
        return gives_up, lifts

    def news(self, machines: Collection[Machine], end_of: EndOf) -> Iterator[PartSays]:
        """Yield news of machines that do not answer any more, once for each until it answers again."""
        if time.monotonic() < self._check_at:
            return
        self._check_at = time.monotonic() + self._silence
        silent = [machine for machine in machines if machine.is_silent(self._silence)]
        for machine in silent:
            if machine.number not in self._silent:
                guess = f"is it cut off, or was its member stopped? kill -CONT {machine.pid} there continues that"
                why = end_of(machine)[0] or guess
                yield PartSays("engines", f"host {machine.host} has not answered for {self._silence:g} s: {why}")
        self._silent = {machine.number for machine in silent}


@dataclass
class _Pipe:
    fd: int  # the writing end
    waiting: bytearray = field(default_factory=bytearray)
    written: int = 0  # bytes
    dropped: int = 0  # bytes, since it last took some
    ended: bool = False  # nothing more comes


class Backlog:
    """Pipes for the output of ranks on other machines, which are read like those of ranks on this machine.

    ``limit``: bytes that may wait in all pipes before ``full``; None: no limit.

    Without a limit no machine waits, and output above 4 MiB is dropped: a line in its place says how many bytes.
    """

    def __init__(self) -> None:
        self.limit: int | None = _LIMIT
        self._pipes: dict[tuple[int, int], _Pipe] = {}

    @property
    def full(self) -> bool:
        """True if machines must wait until more output was read."""
        return self.limit is not None and self._holds_more_than(self.limit)

    def _holds_more_than(self, size: int) -> bool:
        return sum(len(pipe.waiting) for pipe in self._pipes.values()) > size

    def open(self, rank: int, streams: Iterable[int]) -> list[int]:
        """Make pipes for a rank's streams. Return their reading ends, which the receiver owns."""
        readers = []
        for stream in streams:
            reader, writer = os.pipe()
            # The thread must listen to machines even if nobody reads the output.
            os.set_blocking(writer, False)
            self._pipes[rank, stream] = _Pipe(writer)
            readers.append(reader)
        return readers

    def add(self, rank: int, stream: int, data: bytes) -> None:
        """Add output of a rank; b"": it will print no more."""
        pipe = self._pipes.get((rank, stream))
        if pipe is None:  # nobody reads it any more
            return
        if data and self.limit is None and self._holds_more_than(_LIMIT):
            pipe.dropped += len(data)
            return
        if pipe.dropped:
            pipe.waiting += f"\nmlaunch: {pipe.dropped} bytes that were printed here are lost: nobody read\n".encode()
            pipe.dropped = 0
        pipe.waiting += data
        pipe.ended = not data
        self._write(rank, stream)

    def end(self, ranks: Collection[int]) -> None:
        """Note that these ranks will print no more."""
        for rank, stream in list(self._pipes):
            if rank in ranks:
                self.add(rank, stream, b"")

    def ends(self) -> dict[tuple[int, int], int]:
        """Return for each pipe the position at which its output ends now."""
        return {key: pipe.written + len(pipe.waiting) for key, pipe in self._pipes.items()}

    def is_past(self, ends: Mapping[tuple[int, int], int]) -> bool:
        """True if all pipes have taken the output up to these positions."""
        return all(self._pipes[key].written >= end for key, end in ends.items() if key in self._pipes)

    def blocked(self) -> list[int]:
        """Return the descriptors that must become writable before ``flush`` can write more."""
        return [pipe.fd for pipe in self._pipes.values() if pipe.waiting]

    def flush(self) -> None:
        """Write what can be written without waiting."""
        for rank, stream in list(self._pipes):
            self._write(rank, stream)

    def _write(self, rank: int, stream: int) -> None:
        pipe = self._pipes[rank, stream]
        with contextlib.suppress(BlockingIOError):
            try:
                while pipe.waiting:
                    size = os.write(pipe.fd, pipe.waiting)
                    pipe.written += size
                    del pipe.waiting[:size]
            except BrokenPipeError:
                pipe.waiting.clear()
                pipe.ended = True
        if pipe.ended and not pipe.waiting:
            os.close(self._pipes.pop((rank, stream)).fd)

    def see_out(self, ranks: Collection[int], other: int, hear: Callable[[], bool]) -> None:
        """Write the ranks' last output, which its reader reads to the end, and close.

        ``hear``: reads what comes at ``other``; False: nobody reads the output any more.
        """
        # After the launch's last record: a longer wait before that would delay errors behind a slow reader. 300 MB of
        # four ranks arrived whole over ssh, mpirun and Slurm, at a reader that took two minutes for them.
        self.end(ranks)
        goes_on = True
        while goes_on and self.blocked():
            if other in ready([other], self.blocked(), None):
                goes_on = hear()
            self.flush()
        self.close()

    def close(self) -> None:
        """Close all pipes, and drop output that was not read."""
        for pipe in self._pipes.values():
            os.close(pipe.fd)
        self._pipes.clear()
