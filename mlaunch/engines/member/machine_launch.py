"""One launch on one machine, told to a caller elsewhere: each record of its agent, and all that its ranks print."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mlaunch.agreed_stop.wire import NAME, AskToStop
from mlaunch.base.fds import KeptFd, close_all, ready
from mlaunch.caller.launch.watchdog import Killed, Limits, remove_names
from mlaunch.caller.server.fork_server import ForkServer
from mlaunch.core.load import MachineParts
from mlaunch.engines.member.lease_term import SignalsHere, Term
from mlaunch.engines.member.status_requests import BoardNews, Looks
from mlaunch.engines.wire.frame_codes import NoiseError
from mlaunch.engines.wire.member_messages import (
    Alive,
    FromAgent,
    Lease,
    Look,
    MachineDone,
    Printed,
    ServerEnded,
)
from mlaunch.protocol.board import Board
from mlaunch.protocol.messages import (
    AgentSays,
    AgentStarted,
    CallOver,
    Cancel,
    EndCall,
    EndRanks,
    Finished,
    ForPart,
    MeetAgain,
    NextCall,
    PartSays,
    RankAnswered,
    RankGone,
    RanksBack,
    RanksStand,
    RanksStarting,
    RankStarted,
    Reaped,
)
from mlaunch.protocol.payload import Payload
from mlaunch.protocol.server_messages import BoardFds

if TYPE_CHECKING:
    from mlaunch.engines.wire.member_streams import MembersStream

_READ, _PIPE = 32768, 65536  # bytes of what a rank prints: read at once, and in a pipe at most
_FULL = 1 << 20  # bytes that wait to be sent, above which ranks that print must wait
_LOOK_DELAY = 0.2  # seconds between looks at the board
_WITH_CONTENT = (RankAnswered, RankGone, RanksBack, RanksStand)
_CallRecord = NextCall | EndCall | MeetAgain | EndRanks | ForPart


class MachineLaunch:
    """Starts a launch here. ``call``: the memfd of the call, which stays the creator's; -1: ranks run a command."""

    def __init__(self, stream: MembersStream, parts: MachineParts, server: ForkServer, call: int, term: Term) -> None:
        self._stream = stream
        self._parts = parts
        spec = self._spec = self._agreed = parts.spec  # by all machines
        self._server = server
        self._term = term
        self._limits = Limits(spec.grace_period, spec.seconds, server.kill)
        self._pipes: dict[int, tuple[int, int]] = {}  # by descriptor: rank, stream
        self._board: Board | None = None
        self._early: list[tuple[_CallRecord, int]] = []  # what comes before there are ranks
        self._news = BoardNews(spec.local_world_size)
        self._look_at = time.monotonic()
        self._alone = False  # the caller is gone
        self._pressed = False  # the fork server was killed here, since nobody behind it answered
        self._looks = Looks(stream, spec.context.environ)
        self._signals = SignalsHere(spec.callers_signals)
        self._agent = server.launch(spec, Payload(memfd=call) if call >= 0 else None)

    def run(self) -> None:
        """Runs it to its end, or the caller's."""
        try:
            self._hear_caller()  # what came with the order to start
            while self._step():
                pass
            self._end_output()
            self._send_last_words()
            self._tell_rows()
            if not self._alone:  # else this machine leaves, which is no end that the caller would expect
                self._stream.send(MachineDone())
        finally:
            self._close()

    def _step(self) -> bool:
        """Waits for what comes next, and passes it on; False after the agent's last word."""
        ready = self._wait()
        if self._stream.outgoing in ready:
            self._stream.flush()
        if self._stream.incoming in ready:
            self._hear_caller()
        elif self._term.over and not self._alone:
            self._lose_caller()
            self._term.tell()
        for fd in ready & self._pipes.keys():
            self._carry(fd)
        self._looks.serve(ready)
        if time.monotonic() >= self._look_at:
            self._tell_rows()
        if reason := self._signals.take():
            self._stream.send(FromAgent(PartSays(NAME, AskToStop(reason))))
        killed = self._limits.kill_if_overdue()
        self._pressed = self._pressed or killed is Killed.SERVER
        if killed is Killed.NOTHING_LEFT:
            return False
        return self._agent.fileno() not in ready or self._hear_agent()

    def _wait(self) -> set[int]:
        poll = select.poll()
        poll.register(self._agent.fileno(), select.POLLIN)
        for fd in [*self._looks.fds(), *([] if self._alone else [self._stream.incoming])]:
            poll.register(fd, select.POLLIN)
        if self._stream.unsent:
            poll.register(self._stream.outgoing, select.POLLOUT)
        if self._alone or self._stream.unsent < _FULL:
            for fd in self._pipes:
                poll.register(fd, select.POLLIN)
        due = [self._look_at - time.monotonic(), *([] if self._alone else [self._term.left])]
        due += [left] if (left := self._limits.timeout()) is not None else []
        return {fd for fd, _ in poll.poll(1000 * max(0.0, min(due)))}

    def _hear_caller(self) -> None:
        try:
            for record, content in self._stream.receive():
                if isinstance(record, Cancel):
                    self._cancel(record)
                elif isinstance(record, Lease):
                    self._term.lease = record
                    self._stream.send(Alive())
                elif isinstance(record, Look):
                    self._looks.ask(record)
                elif isinstance(record, _CallRecord):
                    self._call(record, content)
        except (EOFError, NoiseError):
            self._lose_caller()

    def _lose_caller(self) -> None:
        self._alone = True
        self._stream.forget()
        self._cancel(Cancel())

    def _cancel(self, record: Cancel) -> None:
        self._limits.begin_cancel(force=record.force)
        self._agent.try_send(record)

    def _call(self, record: _CallRecord, content: int) -> None:
        """Passes on what concerns the ranks. It waits for them: to an agent that joins it were the end."""
        if self._board is None and not isinstance(record, EndRanks):
            self._early.append((record, content))
            return
        if isinstance(record, EndRanks):
            self._limits.begin_cancel(force=False)
        self._agent.try_send(record, [content] if content >= 0 else [])
        if content >= 0:
            os.close(content)

    def _hear_agent(self) -> bool:
        record, fds = self._agent.hear()
        if record is None:
            silence = "did not answer (was it stopped?) and was killed"
            self._stream.send(ServerEnded(silence if self._pressed else self._server.describe_exit()))
            remove_names(self._spec, self._agreed)
            return False
        if isinstance(record, RankGone):
            self._tell_rows()
        if isinstance(record, CallOver):
            self._end_call(record, fds)
        elif not isinstance(record, AgentStarted | Finished):
            self._stream.send(FromAgent(record), fds[0] if fds and isinstance(record, _WITH_CONTENT) else -1)
        if isinstance(record, Reaped) and record.exitcode != 0:
            remove_names(self._spec, self._agreed)
        self._take(record, fds)
        return not isinstance(record, Finished | Reaped)

    def _take(self, record: AgentSays, fds: Sequence[int]) -> None:
        """Takes the descriptors, which are this machine's business."""
        if isinstance(record, AgentStarted):
            self._limits.agent = KeptFd(fds[0])
        elif isinstance(record, RanksStarting):
            self._board = Board(BoardFds.of(fds).board)
            self._agreed = replace(self._spec, launch_id=record.launch_id, rank_start=record.rank_start)
            self._looks.learn(record)
            for early in self._early:
                self._call(*early)
            self._early.clear()
            close_all(fds[1:])  # by which ranks that stay would hear calls past their agent, and answer
        elif isinstance(record, RankStarted):
            close_all(fds[: record.channels])
            streams = self._spec.streams(record.rank - self._spec.rank_start)
            for fd, stream in zip(fds[record.channels :], streams, strict=True):
                os.set_blocking(fd, False)
                self._pipes[fd] = record.rank, stream
        else:
            close_all(fds)

    def _carry(self, fd: int) -> bool:
        """Passes on what a rank has printed; False if nothing was there."""
        rank, stream = self._pipes[fd]
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return False
        if not data:
            del self._pipes[fd]
            os.close(fd)
        self._stream.send(Printed(rank, stream, data))
        return True

    def _end_call(self, record: CallOver, fds: Sequence[int]) -> None:
        """Tells that ranks that stay are back, after what they have done, printed and returned."""
        self._tell_rows()
        # As much as a pipe can hold: what ranks printed in this call, not what they print from then on.
        for _ in range(_PIPE // _READ):
            for fd in list(self._pipes):
                self._carry(fd)
        memfds = iter(fds)
        for answer in record.answers:
            self._stream.send(FromAgent(answer), -1 if answer.data else next(memfds))
        self._stream.send(FromAgent(CallOver(record.number)))

    def _tell_rows(self) -> None:
        self._look_at = time.monotonic() + _LOOK_DELAY
        for record in self._news.of(self._board) if self._board is not None else ():
            self._stream.send(record)

    def _end_output(self) -> None:
        """Passes on what ranks left in their pipes; somebody who outlived them may still hold the other end."""
        while any([self._carry(fd) for fd in list(self._pipes)]):
            pass

    def _send_last_words(self) -> None:
        """Brings the caller what features have for it, no faster than the stream takes it."""
        for feature, news in self._parts.last_words(self._agreed):
            self._stream.send(PartSays(feature, news))
            while self._stream.unsent > _FULL and not (self._alone or self._term.over):
                ready([self._stream.incoming], [self._stream.outgoing], self._term.milliseconds())
                self._stream.flush()
                self._hear_caller()

    def _close(self) -> None:
        close_all(self._pipes)
        close_all(content for _, content in self._early if content >= 0)
        self._looks.close()
        self._agent.close()
        self._limits.close()
        if self._board is not None:
            self._board.close()
