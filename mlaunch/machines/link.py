"""One machine's end of the connection to the other machines of a launch, in a process beside the agent.

It joins at the gate, passes on records of the agent and the gate, sends heartbeats, and carries the ranks' traffic with
the store. ::

    agent <--records (Channel)--> this process --control: JSON lines, heartbeats-----------> gate
    ranks --torch's protocol, loopback--> streams --store: pieces of many streams---------> gate, which is the store

    connecting --join--> waiting --plan--> running --"over", or the gate is lost--> the agent ends this process
        ^   |                |
        +---+----trouble-----+   (again and again, until join_timeout)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any, cast

from mlaunch.agreed_stop.wire import (
    NAME,
    AskAll,
    FreezeRanks,
    NobodyChecks,
    RanksFrozen,
    StopOrder,
    StopRanks,
    ThawRanks,
    is_check_count,
)
from mlaunch.base.exceptions import RankFailure
from mlaunch.base.text import printable
from mlaunch.features import with_hook
from mlaunch.machines.gate.gate import BEATS
from mlaunch.machines.wire import (
    AllGone,
    Beat,
    Done,
    Join,
    LinkHears,
    LinkSays,
    Planned,
    agreed_of_record,
    control_protocol,
    failure_of_record,
    shortened,
)
from mlaunch.machines.wire.control_protocol import Pieces, Record
from mlaunch.protocol.channel import Channel, assert_never
from mlaunch.protocol.messages import CAUSE_DELAY, ForPart, PartSays, Refused, Waiting
from mlaunch.protocol.spec import Rendezvous
from mlaunch.rendezvous.address import interface_of
from mlaunch.rendezvous.peer_user import PeerUser

_HANDSHAKE_TIMEOUT = 60.0  # seconds: the gate may be busy with other machines; after that, the link connects again
_OF_SILENCE = "is that machine cut off, or was a process there stopped (SIGSTOP)? heartbeat_timeout= allows for more"
_RETRY_DELAYS = (0.05, 1.0)  # seconds between attempts to connect, the first and the longest
# In most launches all machines have joined before that, and nothing is printed.
_FIRST_MESSAGE_DELAY = 2.0  # seconds before the first message
_REMINDER_DELAY = 30.0  # seconds before the same message again
_CHECK_DELAY = 0.5  # seconds between checks whether there is something to say
# For all ranks together. A slow gate slows down the ranks that write, and does not fill this process's memory.
_AHEAD = 1 << 22  # bytes that may wait to be sent before the link stops reading from its ranks
_BACKLOG = 4096
_CALL = 0  # the number of the only call in such a launch
_REASON = 100  # bytes
_FEATURES = {feature.name for feature in with_hook("agent.part")}


class LinkProcess:
    """The main object of the link's process. ``agent``: the channel to the agent."""

    def __init__(self, cluster: Rendezvous, join: Join, agent: Channel[LinkHears, LinkSays]) -> None:
        self._cluster = cluster
        self._join = join
        self._agent = agent
        self._wait = JoiningMessages(f"{cluster.master_ip}, port {cluster.port}", agent.try_send)
        self._writer: asyncio.StreamWriter | None = None  # to the gate, after the handshake
        self._master = ""  # its address
        self._failed = False  # here or elsewhere, and not as the consequence of something else
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, listener: socket.socket | None) -> None:
        asyncio.get_running_loop().add_reader(self._agent.fileno(), self._hear_agent)
        self._begin(self._beat())
        self._begin(self._wait.remind())
        try:
            await asyncio.wait_for(self._become_member(), self._cluster.join_timeout)
            if listener is not None:
                self._begin(self._serve_ranks(listener))
            await self._hear_gate_to_the_end()
        except asyncio.TimeoutError:
            over = f"join_timeout={self._cluster.join_timeout:g} s has passed"
            self._agent.try_send(Refused(f"{self._wait.state()}; {over}", late=True))
        except control_protocol.RefusedError as refusal:
            self._agent.try_send(Refused(str(refusal)))
        finally:
            self._hang_up()

    # Joining

    async def _become_member(self) -> None:
        """Join at the gate, and return once the plan has come: all machines have joined. RefusedError if it refuses."""
        pause, longest = _RETRY_DELAYS
        while True:
            try:
                self._reader = await self._connect()
                return await self._wait_for_plan(self._reader)
            except asyncio.TimeoutError:
                pass
            except OSError as error:
                self._wait.trouble = error
            self._wait.joined = ""
            self._hang_up()
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _connect(self) -> asyncio.StreamReader:
        host, port = self._cluster.master_ip, self._cluster.port
        reader, writer = await asyncio.open_connection(host, port, limit=control_protocol.LINE_LIMIT)
        self._master, self._wait.trouble = str(writer.get_extra_info("peername")[0]), control_protocol.SILENT
        try:
            with control_protocol.limited(reader, _HANDSHAKE_TIMEOUT):
                join = {"join": self._join.as_record()}
                await control_protocol.introduce(reader, writer, "control", self._cluster.token, first=join)
        except BaseException:
            writer.close()  # in forks of a fork server, the collector that would close it is off
            raise
        self._writer = writer
        return reader

    def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    async def _wait_for_plan(self, reader: asyncio.StreamReader) -> None:
        limit = max(_HANDSHAKE_TIMEOUT, self._cluster.heartbeat_timeout)
        while True:
            with control_protocol.limited(reader, limit):
                record = await control_protocol.read(reader)
            limit = self._cluster.heartbeat_timeout
            if "refused" in record:
                raise control_protocol.RefusedError(printable(str(record["refused"]), control_protocol.SENTENCE))
            if "waiting" in record:
                self._wait.joined = printable(str(record["waiting"]), control_protocol.SENTENCE)
            if "plan" in record:
                plan = agreed_of_record(record["plan"], self._join)
                address = self._writer.get_extra_info("sockname")[0] if self._writer is not None else ""
                self._wait.over = True
                self._agent.try_send(Planned(plan, interface_of(address)))
                return

    # Running

    async def _hear_gate_to_the_end(self) -> None:
        why, hints = f"no heartbeat came for {self._cluster.heartbeat_timeout:g} s", [_OF_SILENCE]
        try:
            while True:
                with control_protocol.limited(self._reader, self._cluster.heartbeat_timeout):
                    record = await control_protocol.read(self._reader)
                if "failure" in record:
                    failure = shortened(failure_of_record(record["failure"]))
                    self._failed = self._failed or not failure.consequence
                    self._agent.try_send(failure)
                elif (order := order_of(record)) is not None:
                    self._agent.try_send(order)
                elif "over" in record:
                    self._agent.try_send(AllGone())
                    return
        except asyncio.TimeoutError:
            pass
        except OSError:
            why, hints = "its connection was closed", []
        if self._failed:  # then nobody waits for the other machines
            return
        who = f"the master at {self._cluster.master_ip}, port {self._cluster.port},"
        here = self._join.rank_start == 0  # this machine has the gate's process, which something else has ended
        failure = RankFailure(None, 0, f"was lost: {why}", subject=who, consequence=here, hints=(*hints,), kind="lost")
        self._agent.try_send(failure)

    async def _beat(self) -> None:
        """Send heartbeats to the agent and the gate for as long as this process lives."""
        while True:
            await asyncio.sleep(self._cluster.heartbeat_timeout / BEATS)
            self._agent.try_send(Beat())
            self._post({"beat": 1})

    def _hear_agent(self) -> None:
        record, _ = self._agent.hear()
        match record:
            # The agent is gone: this process has nothing left to do, and its tasks have nobody to report to.
            case None:
                os._exit(0)
            case RankFailure():
                self._failed = self._failed or not record.consequence
                self._post({"failure": asdict(record)})
            case PartSays():
                self._post(record_of(record))
            case Done():
                self._post({"done": 1})
            case _:
                assert_never(record)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _post(self, record: control_protocol.Record) -> None:
        if self._writer is not None:
            control_protocol.post(self._writer, control_protocol.encode(record))

    async def _serve_ranks(self, listener: socket.socket) -> None:
        """Carry the ranks' traffic with the store. If that ends before any failure, report it to gate and agent."""
        try:
            await self._carry(listener)
        except (OSError, control_protocol.RefusedError) as error:
            if self._failed:  # that is why it ended
                return
            self._failed, host = True, socket.gethostname()
            who = f"the connection of host {host}'s ranks to the store"
            failure = RankFailure(None, 0, f"broke: {error}", host=host, subject=who, kind="lost")
            self._post({"failure": asdict(failure)})
            self._agent.try_send(failure)

    async def _carry(self, listener: socket.socket) -> None:
        # A separate connection, so that a large value on its way to the store does not delay a failure.
        port, token = self._cluster.port, self._cluster.token
        async with control_protocol.dialled(self._master, port, "store", token) as streams:
            with contextlib.suppress(OSError):
                await RankStreams().serve(listener, streams)
        await asyncio.sleep(CAUSE_DELAY)  # the control connection may bring the cause meanwhile
        raise ConnectionError("its connection was closed")


class JoiningMessages:
    """The messages of a machine that joins. ``there``: where the gate should be; ``tell``: sends one to the agent."""

    def __init__(self, there: str, tell: Callable[[Waiting], object]) -> None:
        self._there, self._tell = there, tell
        self._start = time.monotonic()
        self.trouble: OSError = OSError("trying")  # why there is no connection
        self.joined = ""  # which machines have joined, according to the gate's last record
        self.over = False  # all machines have joined

    async def remind(self) -> None:
        """Tell the agent what this machine waits for, when that changes and every 30 s, until all have joined."""
        told, at = "", self._start
        await asyncio.sleep(_FIRST_MESSAGE_DELAY)
        while not self.over:
            now, state = time.monotonic(), self.joined or str(self.trouble)
            if state != told or now - at >= _REMINDER_DELAY:
                self._tell(Waiting(self.state()))
                told, at = state, now
            await asyncio.sleep(_CHECK_DELAY)

    def state(self) -> str:
        """Return what this machine waits for, and how long it has waited."""
        waited = f"after {time.monotonic() - self._start:.0f} s"
        if self.joined:
            return f"{waited} at {self._there}: {self.joined}"
        trouble = self.trouble
        if isinstance(trouble, control_protocol.UnprovedError):
            return f"{waited} what answers at {self._there} is not accepted as the master ({trouble}): {trouble.advice}"
        advice = "is the launch started on the machine of rank 0, with this port, and does a firewall let it through?"
        if isinstance(trouble, socket.gaierror):
            advice = "is this the name of the machine of rank 0, and does this machine know it? Or give an address"
        return f"{waited} no master answers at {self._there} ({trouble.strerror or trouble}): {advice}"


# Records for features' parts. About a stop that all machines agree on ("unsure" is true if nobody knows whether ranks
# check for a stop at all):
#
#     link -> gate   {"stop": reason, "patience": seconds, "unsure": bool}, {"frozen": checks}
#     gate -> link   {"freeze": reason}, {"thaw": 1}, {"stop_at": check, "reason": reason}, {"unused": 1}
#
# About other features. The gate passes these on unread: to the machine of rank 0, or from that one to all others:
#
#     link -> gate -> link   {"part": feature, "word": its record}


def record_of(said: PartSays) -> Record:
    """Return the record that carries a part's news to the gate."""
    news = said.news
    if isinstance(news, dict):
        return {"part": said.feature, "word": news}
    if isinstance(news, RanksFrozen):
        return {"frozen": news.checks}
    ask = cast(AskAll, news)
    return {"stop": ask.reason, "patience": ask.patience, "unsure": ask.unsure}


def order_of(record: Record) -> ForPart | None:
    """Return what a record of the gate says to a feature; None if it is about something else, or is invalid."""
    word = record.get("word")
    if record.get("part") in _FEATURES and isinstance(word, dict):
        return ForPart(record["part"], _CALL, word)
    order = _order_of(record)
    return None if order is None else ForPart(NAME, _CALL, order)


def _order_of(record: Record) -> StopOrder | None:
    if "unused" in record:
        return NobodyChecks()
    if "thaw" in record:
        return ThawRanks()
    if "freeze" in record:
        return FreezeRanks(printable(str(record["freeze"]), _REASON))
    check = record.get("stop_at")
    if is_check_count(check):
        return StopRanks(check, printable(str(record.get("reason")), _REASON))
    return None


class RankStreams:
    """The streams of one machine's ranks to the gate, and back.

    Data is passed on as it comes, so the link keeps no whole value, however large it is. Ranks connect to a listening
    socket, before or after there is a connection to the gate. Connections from other users' processes are closed.
    """

    def __init__(self) -> None:
        self._ends: dict[int, asyncio.Transport] = {}  # by their streams' numbers
        self._connected: set[asyncio.Transport] = set()
        self._begun = 0
        self._pieces: Pieces | None = None
        self._resuming: asyncio.Task[None] | None = None

    async def serve(self, listener: socket.socket, streams: control_protocol.Streams) -> None:
        """Carry data both ways until the gate's side ends the connection; then close all ranks' connections."""
        self._pieces = pieces = Pieces(*streams)
        loop = asyncio.get_running_loop()
        users = PeerUser()
        server = await loop.create_server(lambda: _RankEnd(self, users), sock=listener, backlog=_BACKLOG)
        try:
            async for stream, data in pieces.received():
                end = self._ends.get(stream)
                if end is not None and data:
                    end.write(data)
                elif end is not None:
                    end.close()
        finally:
            server.close()
            users.close()
            for end in self._connected:
                end.close()

    def connect(self, end: asyncio.Transport) -> None:
        """Add a rank's new connection."""
        self._connected.add(end)
        # Else the link would read from it, while all others wait for the gate.
        if self._resuming is not None:
            end.pause_reading()

    def begin(self, end: asyncio.Transport) -> int:
        """Begin the stream of a connection whose first data has come, and return the stream's number."""
        stream, self._begun = self._begun, self._begun + 1
        self._ends[stream] = end
        return stream

    def say(self, stream: int, data: bytes) -> None:
        """Send a rank's data to the gate; b"" says that its connection is closed."""
        if self._pieces is None:
            return
        self._pieces.send(stream, data)
        if self._pieces.unsent > _AHEAD and self._resuming is None:
            for end in self._connected:
                end.pause_reading()
            self._resuming = asyncio.ensure_future(self._resume(self._pieces))

    async def _resume(self, pieces: Pieces) -> None:
        try:
            await pieces.drained()
        except OSError:  # serve() closes the ranks' connections
            return
        self._resuming = None
        for end in self._connected:
            end.resume_reading()

    def disconnect(self, end: asyncio.Transport, stream: int | None) -> None:
        """Remove a rank's closed connection, and tell the gate if it had a stream."""
        self._connected.discard(end)
        if stream is not None:
            self._ends.pop(stream, None)
            self.say(stream, b"")


class _RankEnd(asyncio.Protocol):
    """One connection of a rank."""

    def __init__(self, streams: RankStreams, users: PeerUser) -> None:
        self._streams = streams
        self._users = users
        self._stream: int | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        # torch's clients know no password, and any user of the machine can connect to a port on loopback.
        if self._users.is_ours(transport.get_extra_info("socket")):
            self._streams.connect(transport)
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._stream is None:
            self._stream = self._streams.begin(self._transport)
        self._streams.say(self._stream, data)

    def connection_lost(self, _: Exception | None) -> None:
        self._streams.disconnect(self._transport, self._stream)
