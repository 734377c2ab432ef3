"""One launch on one machine: it sends its caller each record of its agent, and all that its ranks print.

It passes on a scheduler's signals, and ends when it no longer gets the caller's heartbeat.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from types import FrameType

from mlaunch.agreed_stop.wire import NAME, AskToStop
from mlaunch.base import linux
from mlaunch.base.fds import KeptFd, close_all, ready
from mlaunch.base.text import signal_name
from mlaunch.caller.fork_server import ForkServer
from mlaunch.caller.launch.watchdog import Killed, Limits, remove_names
from mlaunch.core.load import MachineParts
from mlaunch.engines.wire import (
    Alive,
    FromAgent,
    Heartbeat,
    MachineDone,
    MembersStream,
    Printed,
    Reports,
    Rows,
    ServerEnded,
)
from mlaunch.engines.wire.frame_stream import NoiseError
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
    Question,
    RankAnswered,
    RankGone,
    RanksBack,
    RanksStand,
    RanksStarting,
    RankStarted,
    Reaped,
    Told,
)
from mlaunch.protocol.payload import Payload
from mlaunch.protocol.server_messages import BoardFds

_READ, _PIPE = 32768, 65536  # bytes of a rank's output: per read, and in a full pipe
_FULL = 1 << 20  # bytes waiting to be sent, above which ranks that print must wait
_ROWS_DELAY = 0.2  # seconds between two reads of the board
_WITH_CONTENT = (RankAnswered, RankGone, RanksBack, RanksStand, Told)
_CallRecord = NextCall | EndCall | MeetAgain | EndRanks | ForPart
_FAREWELL_TIMEOUT = 60.0  # seconds for the command that gives the machines back
_FAREWELLS, _FAREWELL_DELAY = 60, 5.0  # attempts to give them back, and seconds between; a controller may be down
_OTHERS_DELAY = 1.0  # seconds for the other machines to say why they leave, before all are given back


class MachineLaunch:
    """One launch on this machine; creating the object starts it.

    ``call``: a memfd with the call, which the creator owns; -1: the ranks run a command.
    """

    def __init__(
        self, stream: MembersStream, parts: MachineParts, server: ForkServer, call: int, heartbeat: CallersHeartbeat
    ) -> None:
        self._stream = stream
        self._parts = parts
        spec = self._spec = self._agreed = parts.spec  # as agreed by all machines
        self._server = server
        self._heartbeat = heartbeat
        self._limits = Limits(spec.grace_period, spec.seconds, server.kill)
        self._pipes: dict[int, tuple[int, int]] = {}  # by descriptor: rank, stream
        self._board: Board | None = None
        self._early: list[tuple[_CallRecord, int]] = []  # records that come before there are ranks
        self._news = BoardNews(spec.local_world_size)
        self._rows_at = time.monotonic()
        self._alone = False  # the caller is gone
        self._pressed = False  # the fork server was killed here, since the agent did not answer
        self._signals = SignalsHere(spec.callers_signals)
        self._agent = server.launch(spec, Payload(memfd=call) if call >= 0 else None)

    def run(self) -> None:
        """Run the launch until it ends or the caller is gone."""
        try:
            self._hear_caller()  # what came with the order to start
            while self._step():
                pass
            self._end_output()
            self._send_last_words()
            self._tell_rows()
            if not self._alone:  # else this machine leaves, and nobody reads it
                self._stream.send(MachineDone())
        finally:
            self._close()

    def _step(self) -> bool:
        """Wait for the next events, and pass them on. Return False after the agent's last record."""
        ready = self._wait()
        if self._stream.outgoing in ready:
            self._stream.flush()
        if self._stream.incoming in ready:
            self._hear_caller()
        elif self._heartbeat.over and not self._alone:
            self._lose_caller()
            self._heartbeat.tell()
        for fd in ready & self._pipes.keys():
            self._carry(fd)
        if time.monotonic() >= self._rows_at:
            self._tell_rows()
        if reason := self._signals.take():
            self._stream.send(FromAgent(PartSays(NAME, AskToStop(reason))))
        killed = self._limits.kill_if_overdue()
        self._pressed = self._pressed or killed is Killed.SERVER
        if killed is Killed.NOTHING_LEFT:
            return False
        return self._agent.fileno() not in ready or self._hear_agent()

    def _wait(self) -> set[int]:
        readers = [self._agent.fileno(), *([] if self._alone else [self._stream.incoming])]
        if self._alone or self._stream.unsent < _FULL:
            readers += self._pipes
        writers = [self._stream.outgoing] if self._stream.unsent else []
        due = [self._rows_at - time.monotonic(), *([] if self._alone else [self._heartbeat.left])]
        due += [left] if (left := self._limits.timeout()) is not None else []
        return ready(readers, writers, 1000 * max(0.0, min(due)))

    def _hear_caller(self) -> None:
        try:
            for record, content in self._stream.receive():
                if isinstance(record, Cancel):
                    self._cancel(record)
                elif isinstance(record, Heartbeat):
                    self._heartbeat.last = record
                    self._stream.send(Alive())
                elif isinstance(record, Question):
                    self._ask_agent(record)
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
        """Pass a record about the ranks to the agent, once there are ranks.

        An agent that still joins the other machines would take any record for a request to end.
        """
        if self._board is None and not isinstance(record, EndRanks):
            self._early.append((record, content))
            return
        if isinstance(record, EndRanks):
            self._limits.begin_cancel(force=False)
        self._agent.try_send(record, [content] if content >= 0 else [])
        if content >= 0:
            os.close(content)

    def _ask_agent(self, question: Question) -> None:
        """Pass a question to the agent; as long as the agent joins the other machines, send an empty answer."""
        if self._board is None:
            self._stream.send(FromAgent(Told(question.number)))
        else:
            self._agent.try_send(question)

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
        """Keep or close the descriptors that came with an agent's record."""
        if isinstance(record, AgentStarted):
            self._limits.agent = KeptFd(fds[0])
        elif isinstance(record, RanksStarting):
            self._board = Board(BoardFds.of(fds).board)
            self._agreed = replace(self._spec, launch_id=record.launch_id, rank_start=record.rank_start)
            for early in self._early:
                self._call(*early)
            self._early.clear()
            close_all(fds[1:])  # channels to ranks that stay: calls go through their agent here
        elif isinstance(record, RankStarted):
            close_all(fds[: record.channels])
            streams = self._spec.streams(record.rank - self._spec.rank_start)
            for fd, stream in zip(fds[record.channels :], streams, strict=True):
                os.set_blocking(fd, False)
                self._pipes[fd] = record.rank, stream
        else:
            close_all(fds)

    def _carry(self, fd: int) -> bool:
        """Send the caller what a rank has printed. Return False if there was nothing to read."""
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
        """Send the caller all that ranks that stay have done, printed and returned in a call, then ``CallOver``."""
        self._tell_rows()
        # As much as a pipe can hold: that covers what ranks printed in this call, and little of what they print later.
        for _ in range(_PIPE // _READ):
            for fd in list(self._pipes):
                self._carry(fd)
        memfds = iter(fds)
        for answer in record.answers:
            self._stream.send(FromAgent(answer), -1 if answer.data else next(memfds))
        self._stream.send(FromAgent(CallOver(record.number)))

    def _tell_rows(self) -> None:
        self._rows_at = time.monotonic() + _ROWS_DELAY
        for record in self._news.of(self._board) if self._board is not None else ():
            self._stream.send(record)

    def _end_output(self) -> None:
        """Send what ranks left in their pipes, without waiting for EOF: their children may still hold the other end."""
        while any([self._carry(fd) for fd in list(self._pipes)]):
            pass

    def _send_last_words(self) -> None:
        """Send the caller the features' last records, no faster than the stream takes them."""
        for feature, news in self._parts.last_words(self._agreed):
            self._stream.send(PartSays(feature, news))
            while self._stream.unsent > _FULL and not (self._alone or self._heartbeat.over):
                ready([self._stream.incoming], [self._stream.outgoing], self._heartbeat.milliseconds())
                self._stream.flush()
                self._hear_caller()

    def _close(self) -> None:
        close_all(self._pipes)
        close_all(content for _, content in self._early if content >= 0)
        self._agent.close()
        self._limits.close()
        if self._board is not None:
            self._board.close()


class BoardNews:
    """The part of a board that has not been sent yet. ``size``: the number of ranks here."""

    def __init__(self, size: int) -> None:
        self._rows: tuple[bytes, ...] = ()
        self._reported = [0] * size  # how many reports of each rank were sent

    def of(self, board: Board) -> Iterator[Rows | Reports]:
        """Yield records of what is new since the last time."""
        rows = tuple(map(board.row, range(len(self._reported))))
        # A row has 320 bytes: 64 ranks without news would otherwise send theirs five times a second.
        if rows != self._rows:
            self._rows = rows
            yield Rows(rows)
        found = [board.ring(rank).read(seen) for rank, seen in enumerate(self._reported)]
        self._reported = [count for _, count in found]
        # Ranks report seldom: most machines need no such record.
        if any(new for new, _ in found):
            yield Reports(tuple(tuple(new) for new, _ in found))


class SignalsHere:
    """The signals by which a scheduler asks to stop, caught here for the caller; not in a member that is a thread."""

    def __init__(self, numbers: Collection[int]) -> None:
        self._reason = ""
        for number in numbers if threading.current_thread() is threading.main_thread() else ():
            signal.signal(number, self._take)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self._reason = signal_name(number)

    def take(self) -> str:
        """Return the name of a signal that has come, once; "" if none has."""
        reason, self._reason = self._reason, ""
        return reason


class CallersHeartbeat:
    """The heartbeat of the caller: a machine that receives nothing in time leaves.

    The caller's side, and why one is needed, is in ``mlaunch/engines/caller/machines.py``. ``last``: the last
    one received; None: none yet, and the machine stays.
    """

    def __init__(self, stream: MembersStream) -> None:
        self._stream = stream
        self._told = False
        self.last: Heartbeat | None = None

    @property
    def left(self) -> float:
        """The seconds until the caller counts as lost, if nothing comes before."""
        return math.inf if self.last is None else self._stream.heard_at + self.last.timeout - time.monotonic()

    @property
    def over(self) -> bool:
        """True if nothing has come in time, not even data that this process was too busy to read."""
        return self.left <= 0 and not linux.wait_readable([self._stream.incoming], 0.0)

    def milliseconds(self) -> float | None:
        """Return how many milliseconds a poll may take; None: no limit."""
        return None if self.last is None else 1000 * max(0.0, self.left)

    def tell(self) -> None:
        """Print why this machine leaves, once."""
        if self.last is None or self._told:
            return
        self._told = True
        text = f"mlaunch: nothing has come from the caller for {self.last.timeout:g} s, so this machine leaves"
        print(text, file=sys.stderr, flush=True)

    def leave(self) -> None:
        """Print why this machine leaves, and give the machines back. Call it when no process of the launch is left."""
        self.tell()
        if self.last is not None and self.last.farewell:
            time.sleep(_OTHERS_DELAY)
            for _ in range(_FAREWELLS):
                # By this process, since the caller that would give the machines back is gone.
                with contextlib.suppress(subprocess.SubprocessError):
                    subprocess.run(
                        self.last.farewell,
                        check=True,
                        stdin=subprocess.DEVNULL,
                        stdout=sys.stderr,
                        timeout=_FAREWELL_TIMEOUT,
                    )
                    return
                time.sleep(_FAREWELL_DELAY)
