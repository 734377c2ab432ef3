"""The one public port of a launch over several machines, on the machine of rank 0.

Every machine's link holds a control connection to the gate: the link joins, and receives the plan, a refusal, the first
failure anywhere, and the end of the launch. Both sides send heartbeats, so each notices when the other has vanished. A
second connection, of the role "store", carries the traffic of all the machine's ranks with the launch's store, which is
in the gate's process.

    joining --all ranks there--> running --all have said done--> over
       |  refusal                   |  first failure
       +--------> over <------------+
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mlaunch.agreed_stop.wire import AgreedStop, is_check_count
from mlaunch.machines.gate.admission import PATIENCE, Admission, Complaints, Guest
from mlaunch.machines.gate.roster import Roster, placed, role_ranks
from mlaunch.machines.wire import Join, control_protocol, failure_of_record, shortened
from mlaunch.machines.wire.control_protocol import Pieces, Record
from mlaunch.protocol.messages import CAUSE_DELAY
from mlaunch.rendezvous.store_keys import StoreFullError, StoreKeys
from mlaunch.rendezvous.store_server import StoreConnection

_CLOSE_TIMEOUT = 1.0  # seconds for the others to close when all is over
_WORD_DELAY = 0.1, 0.002  # seconds before the gate tells waiting machines who has joined: at least, and per machine
BEATS = 5  # heartbeats within the time after which a machine counts as lost
_REASON = 100  # characters of the reason for a stop
_PATIENCE = 1e9  # seconds


@dataclass(eq=False)
class _JoinedMachine:
    join: Join
    writer: asyncio.StreamWriter
    number: int = -1  # once the launch has begun
    done: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class Gate:
    """The gate of one launch. ``store_limit``: bytes that its store may hold; None: no limit."""

    def __init__(
        self, launch_id: str, token: str | None, heartbeat_timeout: float, store_limit: int | None = None
    ) -> None:
        self._launch_id = launch_id
        self._token = token
        self._heartbeat_timeout = heartbeat_timeout
        self._keys = StoreKeys(store_limit)
        self._members: dict[_JoinedMachine, None] = {}
        self._awaited: set[_JoinedMachine] = set()  # machines that are neither done nor gone
        self._roster = Roster()
        self._word: asyncio.TimerHandle | None = None  # for the next record to machines that wait
        self._complaints = Complaints()
        self._begun = False
        self._refusal = ""
        self._failure: dict[str, Any] | None = None
        self._ended = False
        self._admission: Admission | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stop = GateStop()

    async def serve(self, listener: socket.socket) -> None:
        """Serve for as long as the process lives; the agent that started the process kills it."""
        self._admission = Admission(listener, self._receive)
        beat = self._heartbeat_timeout / BEATS
        while True:
            await asyncio.sleep(beat)
            self._tell({"beat": 1})

    async def _receive(self, guest: Guest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # What a stranger sends is bounded in number, size and time; an error ends only its own connection.
        try:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                with control_protocol.limited(reader, guest.patience):
                    role = await self._admit(reader, writer)
                guest.known(reader)
                if role == "store":
                    await serve_store(self._keys, reader, writer, self._complaints.tell_of_full_store)
                elif role == "control":
                    await self._attend(reader, writer)
        except Exception as error:  # a stranger may cause an error that nobody has foreseen: the launch continues
            self._complaints.tell_of_error(error)
        finally:
            writer.close()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        try:
            return await control_protocol.admit(reader, writer, self._token)
        except control_protocol.WrongTokenError as error:
            if not self._begun:  # after that, the launch waits for no machine
                came = "without a token" if isinstance(error, control_protocol.NoTokenError) else "with another token"
                self._complaints.tell_of_token(str(writer.get_extra_info("peername")[0]), came)
            raise

    # One machine

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with control_protocol.limited(reader, PATIENCE):
            record = await control_protocol.read(reader)
        member = _JoinedMachine(Join.of_record(record.get("join")), writer)
        if not await self._accept(member):
            return
        why = "its connection was closed"
        try:
            while True:
                with control_protocol.limited(reader, self._heartbeat_timeout):
                    record = await control_protocol.read(reader)
                await self._hear(member, record)
        except asyncio.TimeoutError:
            why = f"no heartbeat came for {self._heartbeat_timeout:g} s"
        except OSError:
            pass
        finally:
            member.gone.set()
            await self._lose(member, why)

    async def _accept(self, member: _JoinedMachine) -> bool:
        if self._failure is not None or self._ended:
            return False  # too late for this attempt: the machine tries again, and joins the next one
        if self._begun:
            text = f"the launch at this port has begun, without {member.join.who}: a second launch needs another port"
            await control_protocol.send(member.writer, {"refused": text})
            return False
        self._refusal = self._refusal or self._roster.conflict(member.join)
        self._members[member] = None
        self._awaited.add(member)
        if self._refusal:
            self._start(self._tell_master_last({"refused": self._refusal}))
            return True
        self._roster.add(member.join)
        if self._roster.complete:
            self._begin()
        else:
            self._tell_soon()
        return True

    def _tell_soon(self) -> None:
        """Send the waiting machines, after a delay, one record about all that have joined by that time.

        The more machines wait, the longer is the delay.
        """
        # Telling every machine about each newcomer took 9.8 GB with 1,250 machines.
        if self._word is None:
            least, each = _WORD_DELAY
            delay = max(least, each * len(self._members))
            self._word = asyncio.get_running_loop().call_later(delay, self._tell_who_is_there)

    def _tell_who_is_there(self) -> None:
        self._word = None
        if self._members and not self._begun and not self._refusal:
            self._tell({"waiting": self._roster.describe()})

    def _begin(self) -> None:
        self._begun = True
        ordered = sorted(self._members, key=lambda member: member.join.place)
        joins = placed([member.join for member in ordered])
        plan = {
            "launch_id": self._launch_id,
            "attempt": max(join.attempt for join in joins),  # a machine that was replaced begins with 0
            "num_nodes": len(joins),
            "world_size": joins[0].world_size,
            # Ranks sign what they exchange with this secret. It crosses the network in plain text: with a token, they
            # sign with both together.
            "secret": secrets.token_hex(16),
        }
        roles = role_ranks(joins)
        for index, (member, join, (start, size)) in enumerate(zip(ordered, joins, roles, strict=True)):
            own = {"node_rank": index, "rank_start": join.rank_start, "role_start": start, "role_size": size}
            member.join, member.number = join, index
            self._stop.add(index, member.writer)
            control_protocol.post(member.writer, control_protocol.encode({"plan": {**plan, **own}}))

    async def _hear(self, member: _JoinedMachine, record: control_protocol.Record) -> None:
        if isinstance(record.get("failure"), dict):
            failure = shortened(failure_of_record(record["failure"]))
            self._start(self._fail(asdict(failure), source=member))
        elif "done" in record:
            member.done = True
            self._awaited.discard(member)
            self._stop.remove(member.number)
            self._end_if_over()
        elif self._begun and "part" in record:
            self._pass_on(member, {"part": record["part"], "word": record.get("word")})
        elif self._begun:
            self._stop.hear(member.number, record)

    def _pass_on(self, member: _JoinedMachine, record: control_protocol.Record) -> None:
        """Pass a feature's record on: from the first machine to all others, from any other only to the first."""
        if member.number == 0:
            self._tell(record, besides=member)
            return
        first = next((one for one in self._members if one.number == 0 and not one.gone.is_set()), None)
        if first is not None:
            control_protocol.post(first.writer, control_protocol.encode(record))

    async def _lose(self, member: _JoinedMachine, why: str) -> None:
        self._awaited.discard(member)
        self._stop.remove(member.number)
        if not self._begun:
            del self._members[member]  # it may come back
            if not self._refusal:
                self._roster.remove(member.join)
                self._tell_soon()
        elif not member.done:
            lost = {"subject": member.join.who, "host": member.join.host, "what": f"was lost: {why}"}
            await self._fail(lost, source=member)
            self._end_if_over()

    # All machines

    async def _fail(self, failure: dict[str, Any], source: _JoinedMachine) -> None:
        """Send the first failure to all machines except its source. Later ones go only to their own machine's caller.

        A failure that looks like the consequence of another waits a moment for its cause. If the cause comes even later
        (the loss of a machine whose ranks continued without the gate, for example), it is sent as well.
        """
        # "connection closed by peer" comes from all other machines, mostly before the failure that caused it.
        if failure.get("consequence"):
            await asyncio.sleep(CAUSE_DELAY)
        if self._failure is None or (self._failure.get("consequence") and not failure.get("consequence")):
            self._failure = failure
            self._tell({"failure": failure}, besides=source)

    def _end_if_over(self) -> None:
        if not self._ended and not self._awaited:
            self._ended = True
            self._start(self._end())

    async def _end(self) -> None:
        """Close the port, then tell all machines that the launch is over: the next launch may use the port at once."""
        if self._admission is not None:
            self._admission.close()
        await self._tell_master_last({"over": 1})

    async def _tell_master_last(self, record: control_protocol.Record) -> None:
        """Send a record to all machines, and to the master's only when the others have closed, or after a second.

        The master's agent ends this process when it receives the record, and with it what others have not read yet.
        """
        master = min(self._members, key=lambda member: member.join.place, default=None)
        if master is None:  # all machines were refused, and left before this record
            return
        others = [member.gone.wait() for member in self._members if member is not master]
        self._tell(record, besides=master)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*others), _CLOSE_TIMEOUT)
        with contextlib.suppress(OSError):
            await control_protocol.send(master.writer, record)

    def _tell(self, record: control_protocol.Record, besides: _JoinedMachine | None = None) -> None:
        # Encoded once for all: 0.16 s for 1,250 machines, mostly in the kernel. A tree of machines would need repair
        # whenever the failure is that of a machine in it.
        line = control_protocol.encode(record)
        for member in self._members:
            if member is not besides and not member.gone.is_set():
                control_protocol.post(member.writer, line)  # without waiting for a slow one

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class GateStop:
    """The step at which the ranks of all machines stop, if each machine has its own caller.

    A machine asks for a stop. The gate makes all machines freeze their ranks and report how often each rank has checked
    for a stop, and tells all at which check to stop. The members are the machines that have not ended, by number.
    """

    def __init__(self) -> None:
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._agreed: AgreedStop | None = None
        self._reason = ""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, machine: int, writer: asyncio.StreamWriter) -> None:
        """Add a machine when the launch begins. ``writer``: that of its control connection."""
        self._writers[machine] = writer

    def remove(self, machine: int) -> None:
        """Leave a machine out: its ranks are gone, or it is lost."""
        if self._writers.pop(machine, None) is not None:
            self.take_steps()

    def hear(self, machine: int, record: Mapping[str, object]) -> None:
        """Handle a machine's record about a stop; ignore what is invalid in it."""
        reason, patience, checks = record.get("stop"), record.get("patience"), record.get("frozen")
        sensible = isinstance(reason, str) and reason.isprintable() and 0 < len(reason) <= _REASON
        if isinstance(patience, bool) or not isinstance(patience, int | float) or not 0 <= patience <= _PATIENCE:
            patience = None
        if sensible and patience is not None and self._agreed is None:
            self._reason, clock = str(reason), asyncio.get_running_loop().time
            self._agreed = AgreedStop(self, clock, machine if record.get("unsure") is True else None)
            self._agreed.begin(float(patience))
        elif self._agreed is not None and is_check_count(checks):
            self._agreed.freeze.take(machine, checks)
        self.take_steps()

    def take_steps(self) -> None:
        """Take the steps that are due."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, agreed = None, self._agreed
        if agreed is None:
            return
        agreed.take_steps()
        if agreed.unused and agreed.asked_by is not None:
            self._agreed = None
            self._post(agreed.asked_by, {"unused": 1})
        elif agreed.due < float("inf"):
            self._timer = asyncio.get_running_loop().call_at(agreed.due, self.take_steps)

    # The members, as AgreedStop sees them

    def working(self) -> Collection[int]:
        return list(self._writers)

    def freeze(self, member: int) -> None:
        self._post(member, {"freeze": self._reason})

    def thaw(self, member: int) -> None:
        self._post(member, {"thaw": 1})

    def stop_at(self, member: int, check: int) -> None:
        self._post(member, {"stop_at": check, "reason": self._reason})

    def _post(self, member: int, record: Record) -> None:
        if member in self._writers:
            control_protocol.post(self._writers[member], control_protocol.encode(record))


async def serve_store(
    keys: StoreKeys,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    tell_full: Callable[[], None] = lambda: None,
) -> None:
    """Serve the store to a machine's ranks until the machine is gone: a session for each of their connections.

    ConnectionError for what no link sends.

    ``tell_full`` is called when the store has no room for a rank's request.
    """
    pieces = Pieces(reader, writer)
    sessions: dict[int, StoreConnection] = {}
    begun = 0
    try:
        async for stream, data in pieces.received():
            # Only the next number begins a stream: pieces that were still on their way must not revive a stream that
            # the gate has ended.
            if stream == begun:
                begun += 1
                sessions[stream] = StoreConnection(keys, _answering(pieces, stream))
            if _feed(sessions, stream, data, pieces):
                tell_full()
            if pieces.unsent:
                await pieces.drained()  # the gate reads nothing from a machine that does not read
    finally:
        for session in sessions.values():
            session.close()


def _feed(sessions: dict[int, StoreConnection], stream: int, data: bytes, pieces: Pieces) -> bool:
    """Pass a stream's data to its session, and end a stream whose client asks for the impossible.

    True if the store had no room for it.
    """
    session, is_full = sessions.get(stream), False
    if session is None:  # the gate has ended this stream
        return False
    try:
        session.feed(data)
    except (ValueError, LookupError) as error:
        pieces.send(stream, b"")
        data, is_full = b"", isinstance(error, StoreFullError)
    if not data:
        sessions.pop(stream).close()
    return is_full


def _answering(pieces: Pieces, stream: int) -> Callable[[bytes], None]:
    return lambda data: pieces.send(stream, data)
