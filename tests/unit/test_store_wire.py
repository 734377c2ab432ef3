"""Torch's own clients at our store, through link and gate: whatever they ask, they are answered as by torch's store.

Their language is torch's own affair. When this file fails with a new torch,
``mlaunch/rendezvous/store_server.py`` is to learn what is new; until then launches over several machines do not
work with it.
"""

from __future__ import annotations

import contextlib
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from mlaunch.rendezvous import store_keys, tcp_store
from mlaunch.rendezvous.address import LOOPBACK, listen
from mlaunch.rendezvous.store_keys import StoreKeys
from mlaunch.rendezvous.store_server import _MAGIC, Asked, Requests, StoreConnection, UnknownRequestError
from mlaunch.rendezvous.tcp_store import connect
from tests.unit.stores import store_of_a_launch, store_of_one_machine, store_of_torch

SHORT = timedelta(milliseconds=50)


@pytest.fixture(params=[store_of_torch, store_of_one_machine, store_of_a_launch])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    with request.param() as port:
        yield port


def client(port: int) -> Any:
    with tcp_store.from_files_only():
        return connect(LOOPBACK, port, timedelta(seconds=60))


def has(name: str) -> bool:
    return hasattr(dist.TCPStore, name)


KNOWN = {
    "add", "append", "barrier", "check", "clone", "compare_set", "delete_key", "get", "list_keys", "multi_get",
    "multi_set", "num_keys", "queue_len", "queue_pop", "queue_push", "set", "wait",
}  # fmt: skip
LOCAL = {"has_extended_api", "host", "libuvBackend", "port", "set_timeout", "timeout"}


def test_all_that_a_client_can_ask_is_known() -> None:
    offered = {name for name in dir(dist.TCPStore) if not name.startswith("_")}
    assert not offered - KNOWN - LOCAL


def test_a_request_that_no_torch_has_made_is_refused_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Only of torch's clients, not of who looks for open ports."""
    greeting, unknown = bytes([Asked.VALIDATE]) + _MAGIC.to_bytes(4, "little"), b"\xc8"
    for pieces in ([unknown], [greeting, unknown], [greeting + unknown]):
        connection = StoreConnection(StoreKeys(), lambda _: None)
        for piece in pieces[:-1]:
            connection.feed(piece)
        with pytest.raises(UnknownRequestError, match="request 200"):
            connection.feed(pieces[-1])
    [told] = [record.getMessage() for record in caplog.records]
    assert re.search(
        r"\(request 200\), and has refused it: torch \S+ makes .* \(2\.6 to [\d.]+\) do not make; install", told
    )


def test_values(port: int) -> None:
    store = client(port)
    store.set("a", "1")
    store.set("", "empty name")
    store.set("empty", "")
    assert (store.get("a"), store.get(""), store.get("empty")) == (b"1", b"empty name", b"")
    assert (store.add("n", 5), store.add("n", -7), store.add("a", 1)) == (5, -2, 2)
    assert (store.get("n"), store.get("a")) == (b"-2", b"2")
    assert (store.check(["a", "n"]), store.check(["a", "none"]), store.check([])) == (True, False, True)
    assert store.num_keys() == 4
    assert (store.delete_key("a"), store.delete_key("a"), store.num_keys()) == (True, False, 3)
    store.append("list", "x")
    store.append("list", "yz")
    store.multi_set(["p", "q"], ["1", "2"])
    assert store.multi_get(["p", "q", "list"]) == [b"1", b"2", b"xyz"]
    if has("list_keys"):
        assert sorted(store.list_keys()) == ["", "empty", "list", "n", "p", "q"]


def test_compare_and_set(port: int) -> None:
    store = client(port)
    answers = [store.compare_set("c", *pair) for pair in (("x", "y"), ("", "y"), ("n", "z"), ("y", "z"), ("z", ""))]
    assert answers == [b"x", b"y", b"y", b"z", b""]
    assert (store.check(["c"]), store.compare_set("c", "", "again")) == (True, b"again")


@pytest.mark.parametrize("size", [0, 1, 65_536, 3 << 20])
def test_values_of_any_size(port: int, size: int) -> None:
    value = random.Random(size).randbytes(size)
    client(port).set("large", value)
    assert client(port).get("large") == value


def test_many_keys_at_once(port: int) -> None:
    store, names = client(port), [f"a key with a rather long name, number {number}" for number in range(3000)]
    store.multi_set(names, [str(number) for number in range(3000)])
    store.wait(names)
    assert store.multi_get(names) == [str(number).encode() for number in range(3000)]


def in_background(work: Callable[[], Any]) -> Callable[[], Any]:
    """Begins some work in a thread; returns what waits for its value."""
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.append(work()))
    thread.start()

    def result() -> Any:
        thread.join(60)
        return values[0]

    return result


def test_waiting(port: int) -> None:
    first, second = client(port), client(port)
    with pytest.raises(dist.DistStoreError, match="timeout"):
        first.wait(["x"], SHORT)
    assert first.add("the connection is in step", 1) == 1
    waiter = in_background(lambda: first.wait(["x", "y", "x"], timedelta(seconds=60)))
    for name in ("x", "y"):
        second.set(name, "")
    waiter()
    assert first.get("x") == b""


def test_a_waiting_client_may_leave(port: int) -> None:
    for _ in range(5):
        leaving = client(port)
        with pytest.raises(dist.DistStoreError, match="timeout"):
            leaving.wait(["x"], timedelta(milliseconds=1))
        del leaving
    store = client(port)
    store.set("x", "there")
    assert store.get("x") == b"there"


@pytest.mark.skipif(not has("queue_push"), reason="this torch's store has no queues")
def test_queues(port: int) -> None:
    store, other = client(port), client(port)
    if not store.libuvBackend:
        del store, other
        pytest.skip("this torch's store has no queues without libuv")
    for value in ("1", "2"):
        store.queue_push("q", value)
    assert (store.queue_len("q"), store.check(["q"]), store.num_keys(), store.delete_key("q")) == (2, True, 0, False)
    assert [store.queue_pop("q") for _ in range(2)] == [b"1", b"2"]
    assert (store.queue_len("q"), store.check(["q"])) == (0, False)
    with pytest.raises(dist.DistError, match="empty"):
        store.queue_pop("q", False)
    waiter = in_background(lambda: other.wait(["q"], timedelta(seconds=60)))
    store.queue_push("q", "3")
    waiter()
    assert other.queue_pop("q") == b"3"


@pytest.mark.skipif(not has("barrier"), reason="this torch's store has no barrier")
def test_barrier(port: int) -> None:
    first, second = client(port), client(port)
    waiter = in_background(lambda: first.barrier("b", 2, timedelta(seconds=60)))
    second.barrier("b", 2, timedelta(seconds=60))
    waiter()
    assert first.get("b") == b"2"
    with pytest.raises(dist.DistError):
        first.barrier("alone", 2, SHORT)
    assert first.get("b") == b"2"


def test_a_client_that_asks_for_the_impossible_harms_no_other() -> None:
    """Torch's own store ends with it, and all ranks with the store."""
    with store_of_a_launch() as port:
        good, bad = client(port), client(port)
        good.set("text", "no number")
        assert good.get("text") == b"no number"  # it is there: what another one asks could come before
        with pytest.raises(dist.DistError):
            bad.add("text", 1)
        assert good.get("text") == b"no number"
        with socket.create_connection((LOOPBACK, port), 60) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert stranger.recv(100) == b""
        assert good.add("n", 1) == 1


# Without sockets


def said_by_a_client() -> bytes:
    """What torch's own client sends for one thing after the other."""
    with listen() as listener:
        connecting = in_background(lambda: client(listener.getsockname()[1]))
        end, _ = listener.accept()
        with end:
            begin = end.recv(10, socket.MSG_WAITALL)
            end.sendall(begin[6:])
            store = connecting()
            store.set("key", "value")
            store.multi_set(["p", "q"], ["1", "2"])
            store.append("key", "more")
            work = in_background(lambda: store.add("n", 3))
            end.settimeout(60)
            data = begin
            while not data.endswith(b"/n\x03" + bytes(7)):
                data += end.recv(10_000)
            end.sendall(bytes(8))
            work()
    return data


def test_requests_may_be_cut_anywhere() -> None:
    data = said_by_a_client()
    whole = list(Requests().feed(data))
    assert [request.asked for request in whole] == [
        Asked.VALIDATE, Asked.PING, Asked.SET, Asked.MULTI_SET, Asked.APPEND, Asked.ADD,
    ]  # fmt: skip
    assert whole[3].strings == [b"/p", b"1", b"/q", b"2"]
    for size in range(1, 30):
        requests = Requests()
        found = [one for at in range(0, len(data), size) for one in requests.feed(data[at : at + size])]
        assert found == whole


@pytest.mark.parametrize("seed", range(30))
def test_nonsense_is_refused_or_waits_for_more(seed: int) -> None:
    chance, answers = random.Random(seed), list[bytes]()
    data = bytearray(said := b"\x00\xce\xf7\x85\x3c" + b"\x04\x02" + bytes(7) + b"/n" + b"\x01" + bytes(7))
    for _ in range(chance.randrange(1, 4)):
        data[chance.randrange(len(said))] = chance.randrange(256)
    session = StoreConnection(StoreKeys(), answers.append)
    with contextlib.suppress(ValueError, LookupError):
        for at in range(0, len(data), 5):
            session.feed(bytes(data[at : at + 5]))
    session.close()
    assert len(answers) <= 1


def test_a_value_is_refused_that_nobody_could_send() -> None:
    with pytest.raises(ValueError, match=r"a request with \d+; at most 8388608"):
        list(Requests().feed(b"\x01" + b"\xff" * 8))


def test_a_store_that_strangers_may_reach_has_room_for_so_much() -> None:
    """They could take the master's memory; what was deleted or taken makes room again."""
    keys = StoreKeys(2000)
    for put in (keys.set, keys.append, keys.push):
        with pytest.raises(ValueError, match="a request with 2201 bytes; the store holds 0 of 2000"):
            put(b"k", bytes(2000))
    for _ in range(3):
        keys.set(b"k", bytes(1500))
        keys.set(b"k", bytes(10))
        keys.append(b"k", bytes(1000))
        assert keys.delete(b"k") == 1
        keys.push(b"q", bytes(1500))
        assert keys.pop(b"q") == (1, bytes(1500))
    keys.set(b"k", bytes(1000))
    with pytest.raises(ValueError, match="the store holds 1201 of 2000"):
        keys.append(b"k", bytes(1000))
    assert keys.get(b"k") == bytes(1000)


def test_a_store_of_known_ranks_has_no_bound() -> None:
    """Torch never deletes what a group has put there: 3.6 KB for each of 8 ranks, all the days of a run."""
    keys, value = StoreKeys(), bytes(8 << 20)
    for number in range(40):  # 320 MiB, in one piece of memory
        keys.set(b"%d" % number, value)
    assert keys.count() == 40


def test_all_keys_of_a_namespace_are_dropped_at_once(port: int) -> None:
    ours = client(port)
    for key in ("launch/1/key", "launch/1/mlaunch/arrived", "launch/2/key", "launch/10/key"):
        ours.set(key, "value")
    ours.delete_key("launch/1/mlaunch/*")
    found = [ours.check([f"launch/{number}/key"]) for number in (1, 2, 10)]
    assert found in ([False, True, True], [True] * 3)  # torch's own takes it for a key


@pytest.mark.parametrize("text", ["0", "-1", "much", "1.5"])
def test_a_limit_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=f"MLAUNCH_STORE_LIMIT='{text}': allowed: MiB, more than 0"):
        store_keys.limit_of({store_keys.VARIABLE: text})
    assert store_keys.limit_of({store_keys.VARIABLE: "3"}) == 3 << 20
    assert store_keys.limit_of({}) == 256 << 20


def test_requests_that_never_become_whole_have_room_for_so_much_together() -> None:
    """Whoever reaches the store may connect as often as descriptors allow, and begin a large value each time."""
    keys, greeting = StoreKeys(3000), b"\x00\xce\xf7\x85\x3c"
    many = b"\x0b" + (5).to_bytes(8, "little") + (b"\x01" + bytes(7) + b"k") * 9  # all but one of ten strings
    begun = b"\x01\x01" + bytes(7) + b"k" + (1 << 20).to_bytes(8, "little") + bytes(1000)
    sessions = [StoreConnection(keys, list[bytes]().append) for _ in range(4)]
    for session in sessions:
        session.feed(greeting)
    for session, said in zip(sessions[:3], (begun, begun, many), strict=True):
        session.feed(said)
    with pytest.raises(ValueError, match=r"a request with 10\d\d bytes; the store holds \d+ of 3000 for its clients"):
        sessions[3].feed(begun)
    sessions[0].close()
    sessions[3].close()
    for session in sessions[1:3]:  # as it becomes whole, it is the store's
        session.close()
    assert keys._held == 0


def test_who_has_not_greeted_is_let_go_before_it_takes_memory() -> None:
    with store_of_one_machine() as port, contextlib.ExitStack() as ends:
        good = client(port)
        for _ in range(20):
            end = ends.enter_context(socket.create_connection((LOOPBACK, port), 60))
            with contextlib.suppress(ConnectionError):
                end.sendall(b"\x01\x01" + bytes(7) + b"k" + (1 << 23).to_bytes(8, "little") + bytes(300_000))
        with contextlib.suppress(ConnectionError):
            assert end.recv(1) == b""
        good.set("key", "value")
        assert good.get("key") == b"value"


@pytest.mark.parametrize("store", [store_of_one_machine, store_of_a_launch])
def test_a_meeting_of_a_malformed_size_is_told_nobody(store: Any, capfd: pytest.CaptureFixture[str]) -> None:
    greeting, meeting = b"\x00\xce\xf7\x85\x3c", b"\x12\x01" + bytes(7) + b"k"
    with store() as port:
        for size in (-1, 0, 1 << 40, -(1 << 63)):
            with socket.create_connection((LOOPBACK, port), 60) as end, contextlib.suppress(ConnectionError):
                end.sendall(greeting + meeting + size.to_bytes(8, "little", signed=True))
                end.shutdown(socket.SHUT_WR)
                while end.recv(100):
                    pass
        good = client(port)
        good.set("key", "value")
        assert good.get("key") == b"value"
    assert capfd.readouterr().err == ""
