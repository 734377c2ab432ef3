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
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any

from mlaunch.base.exceptions import RankFailure
from mlaunch.base.text import printable
from mlaunch.machines.gate.gate import BEATS
from mlaunch.machines.gate.membership import Join, agreed_of_record, failure_of_record, shortened
from mlaunch.machines.link import part_words
from mlaunch.machines.link.joining_words import JoiningWords
from mlaunch.machines.link.streams import RankStreams
from mlaunch.machines.wire import control_protocol
from mlaunch.machines.wire.link_messages import AllGone, Beat, Done, LinkHears, LinkSays, Planned
from mlaunch.protocol.channel import Channel, assert_never
from mlaunch.protocol.messages import CAUSE_DELAY, PartSays, Refused
from mlaunch.protocol.spec import Rendezvous
from mlaunch.rendezvous.address import interface_of

_HANDSHAKE_TIMEOUT = 60.0  # seconds: the gate may be busy with other machines; after that, the link connects again
_OF_SILENCE = "is that machine cut off, or was a process there stopped (SIGSTOP)? heartbeat_timeout= allows for more"
_RETRY_DELAYS = (0.05, 1.0)  # seconds between attempts to connect, the first and the longest


class LinkProcess:
    """The main object of the link's process. ``agent``: the channel to the agent."""

    def __init__(self, cluster: Rendezvous, join: Join, agent: Channel[LinkHears, LinkSays]) -> None:
        self._cluster = cluster
        self._join = join
        self._agent = agent
        self._wait = JoiningWords(f"{cluster.master_ip}, port {cluster.port}", agent.try_send)
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
                elif (order := part_words.order_of(record)) is not None:
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
                self._post(part_words.record_of(record))
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
