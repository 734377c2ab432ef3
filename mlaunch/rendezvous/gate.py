"""The one public port of a launch over several machines, on the machine of rank 0.

Every machine's link holds a control connection to the gate: it joins, and is told the plan, a refusal, the first
failure anywhere, the end of all. Both sides send heartbeats, so a machine that vanished is missed. Connections of the
role "store" are spliced, after the same handshake, to the store, which listens on loopback alone.

    joining --all ranks there--> running --all have said done--> over
       |  refusal                   |  first failure
       +--------> over <------------+
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from mlaunch.protocol.messages import CAUSE_DELAY
from mlaunch.rendezvous import membership, values, wire
from mlaunch.rendezvous.membership import Join

_STRANGERS = 512  # connections at a time that have not proved themselves
_COMPLAINTS, _COMPLAINT = 5, 200  # lines about strangers, and characters of each
_CLOSE_TIMEOUT = 1.0  # seconds for the others to close when all is over
BEATS = 5  # heartbeats within the time after which a machine counts as lost


@dataclass
class _Member:
    join: Join
    writer: asyncio.StreamWriter
    done: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class Gate:
    """Serves one launch. ``store``: the port of the store on loopback."""

    def __init__(self, store: int, launch_id: str, token: str | None, heartbeat_timeout: float) -> None:
        self._store = store
        self._launch_id = launch_id
        self._token = token
        self._heartbeat_timeout = heartbeat_timeout
        self._members: list[_Member] = []
        self._strangers = 0
        self._complaints = 0
        self._begun = False
        self._refusal = ""
        self._failure: dict[str, Any] | None = None
        self._values: dict[int, tuple[int | None, str]] = {}  # rank -> memfd, signature
        self._ended = False
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Serves for as long as the process lives; who ends the launch kills it."""
        self._server = await asyncio.start_server(self._receive, sock=listener, limit=wire.LINE_LIMIT)
        beat = self._heartbeat_timeout / BEATS
        while True:
            await asyncio.sleep(beat)
            await self._tell_all({"beat": 1})

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # What a stranger sends is bounded in number, size and time; whatever goes wrong with it ends it alone.
        try:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                role = await self._admit(reader, writer)
                if role == "store":
                    await wire.splice(reader, writer, "127.0.0.1", self._store)
                elif role == "control":
                    await self._attend(reader, writer)
                elif role == "put" and self._token is not None:
                    await self._take_value(reader, self._token)
                elif role == "get":
                    await self._give_value(reader, writer)
        except Exception as error:  # a stranger has found what we do not foresee: the launch goes on
            self._complain(error)
        finally:
            writer.close()

    def _complain(self, error: Exception) -> None:
        """Says in a line that a connection was closed for an error of ours; soon no more, lest strangers fill a log."""
        self._complaints += 1
        if self._complaints <= _COMPLAINTS:
            what = f"{type(error).__name__} {str(error)[:_COMPLAINT]!a}"
            print(f"mlaunch: the gate closed a connection: {what}", file=sys.stderr, flush=True)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        if self._strangers >= _STRANGERS:
            raise ConnectionError("too many connections that say nothing")
        self._strangers += 1
        try:
            return await asyncio.wait_for(wire.admit(reader, writer, self._token), wire.HANDSHAKE_TIMEOUT)
        finally:
            self._strangers -= 1

    # One machine

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        record = await asyncio.wait_for(wire.read(reader), wire.HANDSHAKE_TIMEOUT)
        member = _Member(Join.of_record(record.get("join")), writer)
        if not await self._accept(member):
            return
        why = "its connection was closed"
        try:
            while True:
                record = await asyncio.wait_for(wire.read(reader), self._heartbeat_timeout)
                await self._hear(member, record)
        except asyncio.TimeoutError:
            why = f"no heartbeat came for {self._heartbeat_timeout:g} s"
        except OSError:
            pass
        finally:
            member.gone.set()
            await self._lose(member, why)

    async def _accept(self, member: _Member) -> bool:
        if self._failure is not None or self._ended:
            return False  # too late for this attempt: it tries again, and meets the next
        if self._begun:
            text = f"the launch at this port has begun, without {member.join.who}: a second launch needs another port"
            await wire.send(member.writer, {"refused": text})
            return False
        joined = [other.join for other in self._members]
        self._refusal = self._refusal or membership.conflict(joined, member.join)
        self._members.append(member)
        if self._refusal:
            self._start(self._tell_master_last({"refused": self._refusal}))
        elif membership.missing([*joined, member.join]):
            await self._tell_all({"waiting": membership.describe([*joined, member.join])})
        else:
            self._begin()
        return True

    def _begin(self) -> None:
        self._begun = True
        self._members.sort(key=lambda member: member.join.place)
        joins = membership.placed([member.join for member in self._members])
        plan = {
            "launch_id": self._launch_id,
            "attempt": max(join.attempt for join in joins),  # one that comes back begins with 0
            "num_nodes": len(joins),
            "world_size": joins[0].world_size,
        }
        for index, (join, role) in enumerate(zip(joins, membership.role_ranks(joins), strict=True)):
            own = {"node_rank": index, "rank_start": join.rank_start, "role_start": role.start, "role_size": role.size}
            self._members[index].join = join
            self._members[index].writer.write(wire.encode({"plan": {**plan, **own}}))

    async def _hear(self, member: _Member, record: wire.Record) -> None:
        if isinstance(record.get("failure"), dict):
            failure = membership.shortened(membership.failure_of_record(record["failure"]))
            self._start(self._fail(asdict(failure), source=member))
        elif "done" in record:
            member.done = True
            self._end_if_over()

    async def _lose(self, member: _Member, why: str) -> None:
        if not self._begun:
            self._members.remove(member)  # it may come back
            if self._members and not self._refusal:
                await self._tell_all({"waiting": membership.describe([other.join for other in self._members])})
        elif not member.done:
            lost = {"subject": member.join.who, "host": member.join.host, "what": f"was lost: {why}"}
            await self._fail(lost, source=member)
            self._end_if_over()

    # Values

    async def _take_value(self, reader: asyncio.StreamReader, token: str) -> None:
        rank, memfd, signature = await values.receive(reader, token, self._launch_id)
        self._values[rank] = memfd, signature
        if self._members and len(self._values) == self._members[0].join.world_size:
            await self._tell_all({"values": 1})

    async def _give_value(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = (await asyncio.wait_for(wire.read(reader), wire.HANDSHAKE_TIMEOUT)).get("rank")
        if isinstance(rank, int) and rank in self._values:
            memfd, signature = self._values[rank]
            await values.send(writer, rank, memfd, signature)

    # All machines

    async def _fail(self, failure: dict[str, Any], source: _Member) -> None:
        """Tells all of the first failure; of later ones each machine tells its own caller.

        One that looks like the consequence of another waits a moment for its cause.
        """
        if failure.get("consequence"):
            await asyncio.sleep(CAUSE_DELAY)
        if self._failure is None:
            self._failure = failure
            await self._tell_all({"failure": failure}, besides=source)

    def _end_if_over(self) -> None:
        if not self._ended and all(member.done or member.gone.is_set() for member in self._members):
            self._ended = True
            self._start(self._end())

    async def _end(self) -> None:
        """Closes the port before anyone is told, since a next launch may use it at once."""
        if self._server is not None:
            self._server.close()
        await self._tell_master_last({"over": 1})

    async def _tell_master_last(self, record: wire.Record) -> None:
        """Its agent ends this process when it hears, and what the others have not read by then may be lost."""
        master = min(self._members, key=lambda member: member.join.place, default=None)
        if master is None:  # refused, and gone before it was told
            return
        others = [member.gone.wait() for member in self._members if member is not master]
        await self._tell_all(record, besides=master)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*others), _CLOSE_TIMEOUT)
        with contextlib.suppress(OSError):
            await wire.send(master.writer, record)

    async def _tell_all(self, record: wire.Record, besides: _Member | None = None) -> None:
        for member in self._members:
            if member is not besides and not member.gone.is_set():
                member.writer.write(wire.encode(record))  # without waiting for a slow one
        await asyncio.sleep(0)

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
