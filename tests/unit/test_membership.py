"""What machines of a launch say of themselves: whether it fits together, and which ranks each gets."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
from typing import Any

import pytest

from mlaunch.base import linux
from mlaunch.base.exceptions import RankFailure
from mlaunch.base.text import printable
from mlaunch.engines.caller.machines import printable_line
from mlaunch.machines.agent import LinkedPeers
from mlaunch.machines.gate import GateConfig
from mlaunch.machines.gate.roster import Roster, placed, role_ranks
from mlaunch.machines.wire import Join, agreed_of_record, control_protocol, failure_of_record, shortened
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.spec import Agreed, Rendezvous
from mlaunch.rendezvous import address
from mlaunch.rendezvous.address import listen


def counted(machine: int, n_gpus: int, **changes: Any) -> Join:
    """One of three machines that do not know each other's sizes."""
    join = Join(
        host=f"h{machine}", rank_start=0, n_gpus=n_gpus, world_size=0, function="train.py", mlaunch="0.1", torch="2.13",
        attempt=0, machine=machine, machines=3,
    )  # fmt: skip
    return Join(**{**join.as_record(), **changes})


def test_machines_that_are_counted_get_their_ranks_in_their_order() -> None:
    machines = placed([counted(2, 4), counted(0, 1), counted(1, 2)])
    assert [(join.host, list(join.ranks)) for join in machines] == [
        ("h0", [0]),
        ("h1", [1, 2]),
        ("h2", [3, 4, 5, 6]),
    ]
    assert {join.world_size for join in machines} == {7}
    assert machines[2].who == "host h2 (ranks 3-6)"


def test_roles_are_counted_by_themselves() -> None:
    machines = [counted(0, 1, role="a"), counted(1, 2, role="b"), counted(2, 4, role="a")]
    assert role_ranks(machines) == [(0, 5), (0, 2), (1, 5)]


def roster_of(*joins: Join) -> Roster:
    roster = Roster()
    for join in joins:
        roster.add(join)
    return roster


def test_which_machines_are_missing() -> None:
    assert roster_of(counted(1, 2)).missing() == [range(1), range(2, 3)]
    assert roster_of(counted(1, 2)).describe() == "1 machine joined (h1); machines 0, 2 of 3 missing"
    assert roster_of(counted(1, 2), counted(0, 2)).describe() == "2 machines joined (h1, h0); machine 2 of 3 missing"
    assert roster_of(*(counted(number, 1) for number in range(3))).complete


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (counted(1, 5), ""),
        (counted(0, 1, rank_start=5, host="other"), "host h0 and host other both have --node-rank 0"),
        (counted(1, 1, machines=2), "host h0 has --nnodes 3, host h1 has --nnodes 2"),
        (counted(1, 1, run_id="b"), "host h0 has --rdzv-id , host h1 has --rdzv-id b"),
        (counted(1, 1, max_restarts=1), "host h0 has --max-restarts 0, host h1 has --max-restarts 1"),
        (counted(3, 1), "host h3 (machine 3) is beyond --nnodes 3"),
        (counted(1, 1, function="other.py"), "host h0 has train.py to run, host h1 has other.py to run"),
    ],
)
def test_machines_that_do_not_fit(new: Join, words: str) -> None:
    assert roster_of(counted(0, 2)).conflict(new) == words


class LinkStandIn:
    """What an agent sees of its link."""

    def __init__(self) -> None:
        self.channel, self.theirs = Channel.pair()
        self.pid = 5


def test_a_link_that_says_nothing_is_killed() -> None:
    """Or it would go on speaking for this machine when somebody wakes it."""
    link = LinkStandIn()
    link.pid = os.fork()
    if link.pid == 0:
        while True:
            signal.pause()
    pidfd = os.pidfd_open(link.pid)
    heard = LinkedPeers(link, 0.0).hear([])  # type: ignore[arg-type]
    ended = linux.wait_readable([pidfd], 30)
    os.kill(link.pid, signal.SIGKILL)
    os.waitpid(link.pid, 0)
    assert ended
    assert isinstance(heard, RankFailure)
    assert heard.what == "said nothing for 0 s (was it stopped?) and was killed"
    os.close(pidfd)
    for channel in (link.channel, link.theirs):
        channel.close()


@pytest.mark.parametrize("heard", [False, True])
def test_one_failure_is_told(heard: bool) -> None:
    """The first of all machines: ours, unless another's has come before."""
    link = LinkStandIn()
    peers = LinkedPeers(link)  # type: ignore[arg-type]
    if heard:
        link.theirs.send(RankFailure(3, 1, "theirs"))
        assert peers.hear([link.channel.fileno()]) == RankFailure(3, 1, "theirs")
    for what in ("first", "second"):
        peers.tell(RankFailure(0, 1, what))
    link.channel.close()
    told = []
    with contextlib.suppress(EOFError):
        while True:
            told.append(link.theirs.receive()[0].what)
    assert told == ([] if heard else ["first"])
    link.theirs.close()


@pytest.mark.parametrize("told", [False, True])
def test_a_link_that_ends_after_a_failure_is_no_news(told: bool) -> None:
    link = LinkStandIn()
    peers = LinkedPeers(link)  # type: ignore[arg-type]
    if told:
        peers.tell(RankFailure(0, 1, "raised ValueError"))
    link.theirs.close()
    heard = peers.hear([link.channel.fileno()])
    who = heard.who if isinstance(heard, RankFailure) else ""
    assert who == ("" if told else "the process that talks to the other machines")
    assert not peers.awaited
    link.channel.close()


def test_the_kernel_keeps_connections_between_machines_alive() -> None:
    """A firewall that forgets a connection does so after minutes at the least."""

    async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await control_protocol.admit(reader, writer, None)
        writer.close()

    async def options() -> list[int]:
        async with await asyncio.start_server(admit, "127.0.0.1") as server:
            port = server.sockets[0].getsockname()[1]
            async with control_protocol.dialled("127.0.0.1", port, min(control_protocol.ROLES), None) as (_, writer):
                end = writer.get_extra_info("socket")
                kept = end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                numbers = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
                return [kept, *(end.getsockopt(socket.IPPROTO_TCP, number) for number in numbers)]

    assert asyncio.run(options()) == [1, 60, 60]


def test_an_accepted_connection_sends_at_once() -> None:
    """Else the second of two records would wait for 40 ms, until a silent other side says that it has the first."""
    with address.listen() as listener, socket.create_connection(listener.getsockname()), listener.accept()[0] as ours:
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_reading_from_who_says_nothing_ends() -> None:
    async def read() -> bytes:
        reader = asyncio.StreamReader()
        with control_protocol.limited(reader, 60.0):
            reader.feed_data(b"in time\n")
            assert await reader.readline() == b"in time\n"
        with control_protocol.limited(reader, 0.0):
            return await reader.readline()

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(read())


def test_the_addresses_of_this_machine_are_those_that_others_reach() -> None:
    assert not any(ipaddress.ip_address(found).is_loopback for found in address.addresses())
    assert address._usual_interface() in {"", *os.listdir("/sys/class/net")}


PLAN: dict[str, Any] = {
    "launch_id": "0123456789ab", "attempt": 0, "num_nodes": 2, "world_size": 4, "node_rank": 1, "rank_start": 2,
    "role_start": 2, "role_size": 4, "secret": "0" * 32,
}  # fmt: skip
TEXTS = ("what", "traceback", "phase", "host", "device", "type_name", "subject")
OWN = Join("h", 2, 2, 4, "f", "1.0", "2.0", 0)


def test_a_record_that_is_a_plan() -> None:
    assert agreed_of_record(PLAN, OWN) == Agreed(**PLAN)
    assert agreed_of_record({**PLAN, "attempt": 7}, counted(1, 2)).attempt == 7


@pytest.mark.parametrize("change", [
    {"launch_id": "../../other/users"}, {"launch_id": "."}, {"launch_id": ""}, {"launch_id": "a" * 65},
    {"launch_id": "a\n"}, {"launch_id": 7}, {"secret": 7}, {"secret": "\x1b[2J"}, {"attempt": -1}, {"attempt": True},
    {"attempt": 1.0}, {"attempt": 10**100}, {"world_size": 1 << 21}, {"world_size": 8}, {"num_nodes": 5},
    {"node_rank": 2}, {"rank_start": 3}, {"rank_start": 0}, {"role_start": 3}, {"role_size": 5}, {"more": 1},
])  # fmt: skip
def test_a_record_that_is_no_plan(change: dict[str, Any]) -> None:
    """Of a gate that may be anybody, where the machines have no token."""
    with pytest.raises(ConnectionError, match="what came is no plan"):
        agreed_of_record({**PLAN, **change}, OWN)


@pytest.mark.parametrize("record", [None, [], {}, "plan", {name: PLAN[name] for name in PLAN if name != "secret"}])
def test_fields_that_make_no_plan(record: object) -> None:
    with pytest.raises(ConnectionError, match="what came is no plan"):
        agreed_of_record(record, OWN)


def test_a_failure_has_bounded_numbers() -> None:
    failure = failure_of_record({"rank": 10**1000, "pid": 3, "exitcode": -9, "what": "failed"})
    assert (failure.rank, failure.pid, failure.exitcode) == (None, 3, -9)
    assert failure_of_record("failed").what == "failed"


def test_words_of_others_cannot_command_a_terminal() -> None:
    evil = "\x1b[2J\x07\u202e\r\ud800"
    failure = shortened(failure_of_record({name: f"a\n{evil}" for name in TEXTS} | {"hints": [evil]}))
    for name in TEXTS:
        text = getattr(failure, name)
        assert text.replace("\n", "").isprintable()
        assert text.startswith("a\n" if name in {"what", "traceback"} else "a\\n")
    assert failure.hints == (r"\x1b[2J\x07\u202e\r?",)
    assert printable_line(b"\x1b]0;title\x07 words\r\n") == r"\x1b]0;title\x07 words"
    assert printable("\x1b" * 100, 10) == r"\x1b\x1b\x"


def test_a_token_is_in_no_repr() -> None:
    with listen() as listener:
        assert "hush" not in repr(GateConfig(listener, "launch", "hush", 1.0))
    assert "hush" not in repr(Rendezvous("h", 1, "hush", 1.0, 1.0))
    assert "0" * 32 not in repr(agreed_of_record(PLAN, OWN))
