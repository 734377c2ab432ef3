"""Records between processes."""

from __future__ import annotations

import dataclasses
import errno
import os
import pickle
import socket
import types
import typing
from collections.abc import Callable
from typing import ClassVar

import pytest

from mlaunch.base.text import both_ends, first_bytes, last_bytes
from mlaunch.engines import wire as member_messages
from mlaunch.machines import wire as machine_records
from mlaunch.protocol import messages, server_messages, spec
from mlaunch.protocol.channel import RECORD_LIMIT, Channel, get_to_know
from mlaunch.protocol.server_messages import BoardFds, DirectFds, LaunchFds, StartFds


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not come is an error at once (EAGAIN), and holds up no test."""
    adopt = Channel.adopt.__func__  # type: ignore[attr-defined]

    def adopted(kind: type[Channel], fd: int) -> Channel:
        os.set_blocking(fd, False)
        channel: Channel = adopt(kind, fd)
        return channel

    monkeypatch.setattr(Channel, "adopt", classmethod(adopted))


def test_records_before_the_end_are_heard() -> None:
    """Also where the other end went without reading what we had said to it."""
    ours, theirs = Channel.pair()
    theirs.send("first")
    theirs.send("last")
    ours.send("unread")
    theirs.close()
    assert [ours.receive()[0], ours.receive()[0]] == ["first", "last"]
    with pytest.raises(EOFError):
        ours.receive()
    ours.close()


def test_a_record_at_the_bound_passes_and_a_larger_one_is_refused_where_it_comes_from() -> None:
    ours, theirs = Channel.pair()
    overhead = len(pickle.dumps(b"x" * 60_000)) - 60_000
    theirs.send(b"x" * (RECORD_LIMIT - overhead))
    assert len(ours.receive()[0]) == RECORD_LIMIT - overhead
    for send in (theirs.send, theirs.try_send):
        with pytest.raises(ValueError, match=rf"a bytes of {RECORD_LIMIT + 1} bytes; a record holds {RECORD_LIMIT}"):
            send(b"x" * (RECORD_LIMIT - overhead + 1))
    ours.close()
    theirs.close()


def test_a_record_that_was_cut_is_an_error_and_leaks_no_descriptor() -> None:
    ours, theirs = Channel.pair()
    reader, writer = os.pipe2(os.O_NONBLOCK)
    socket.send_fds(theirs._socket, [b"x" * (RECORD_LIMIT + 1)], [writer])
    os.close(writer)
    with pytest.raises(OSError, match="was cut") as caught:
        ours.receive()
    assert caught.value.errno == errno.EMSGSIZE
    assert os.read(reader, 1) == b""  # nobody holds the other end
    os.close(reader)
    ours.close()
    theirs.close()


class Told:
    """Notes that it was unpickled."""

    seen: ClassVar[list[str]] = []

    def __reduce__(self) -> tuple[object, ...]:
        return Told.seen.append, ("unpickled",)


@pytest.mark.parametrize("use", [Channel.receive, Channel.peek])
@pytest.mark.parametrize("taken", [True, False], ids=["taken", "closed"])
def test_a_number_that_was_closed_is_not_read(use: Callable[[Channel], object], taken: bool) -> None:
    ours, theirs = Channel.pair()
    number, (stranger, other) = ours.fileno(), Channel.pair()
    other.send(Told())
    os.dup2(stranger.fileno(), number) if taken else os.close(number)
    with pytest.raises(EOFError, match="other code in this process has closed"):
        use(ours)
    assert Told.seen == []
    ours.close()
    for channel in (theirs, stranger, other):
        channel.close()
    if taken:
        os.close(number)  # it was left to its owner


def test_a_number_that_was_taken_is_not_written_to() -> None:
    ours, theirs = Channel.pair()
    reader, writer = os.pipe2(os.O_NONBLOCK)
    os.dup2(writer, ours.fileno())
    number = ours.fileno()
    ours.try_send("record")
    with pytest.raises(BrokenPipeError, match="other code in this process has closed"):
        ours.send("record")
    os.close(writer)
    ours.close()
    os.close(number)
    assert os.read(reader, 100) == b""
    os.close(reader)
    theirs.close()


@pytest.mark.parametrize("text", ["plain", "\N{GRINNING FACE}" * 5, "a\N{GRINNING FACE}b", "\udcff" * 9, ""])
def test_a_text_is_cut_between_characters(text: str) -> None:
    whole = text.encode(errors="replace").decode()
    for limit in range(1, 12):
        beginning, end = first_bytes(text, limit), last_bytes(text, limit)
        assert whole.startswith(beginning)
        assert whole.endswith(end)
        for part in (beginning, end):
            assert min(limit, len(whole.encode())) - 4 < len(part.encode()) <= limit


@pytest.mark.parametrize("limit", [4000, 8192])
@pytest.mark.parametrize("size", [1, 100, 100_000])
def test_both_ends_of_a_text(size: int, limit: int) -> None:
    long = "\N{GRINNING FACE}" * size
    texts = {
        "one line": f"first {long} last",
        "a long line in the middle": f"first\n{long}\nlast",
        "the last line": f"first\nthe reason {long}\nlast",
        "lines": "\n".join(["first", *["a line"] * size, "last"]),
    }
    for text in texts.values():
        cut = both_ends(text, limit)
        assert len(cut.encode()) <= limit
        assert cut.startswith("first")
        assert cut.endswith("last")
        assert len(text) > 500 or cut == text
    assert "characters]" not in both_ends(texts["lines"], limit)


def test_classes_of_records_are_known_before_their_first_record() -> None:
    """Else each forked process would change the class at its first record."""
    kinds = {kind for kind in vars(messages).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    get_to_know(vars(messages).values())
    assert kinds
    assert all("__slotnames__" in vars(kind) for kind in kinds)


# Of a queue, a file or another record.
INSIDE = {
    "Answer",
    "Join",
    "RemoteError",
    "Details",
    "CallFacts",
    "CallersProcess",
    "Operations",
    "GroupNumbers",
    "RankWait",
}


def records_of(module: types.ModuleType) -> set[type]:
    """The record classes that a module defines."""
    kinds = {kind for kind in vars(module).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    return {kind for kind in kinds if kind.__module__ == module.__name__}


def test_the_core_has_few_kinds_of_records() -> None:
    """Classes that processes of a launch send each other, without what a launch is. The number only goes down."""
    count = len(records_of(messages) | records_of(server_messages) | {spec.Details})
    assert count <= 45, "a feature's records are in its own folder, and travel in ForPart and PartSays"


def test_each_record_travels_on_some_channel_or_stream() -> None:
    known = {**vars(messages), **vars(server_messages), **vars(machine_records), **vars(member_messages)}
    named = {name: value for name, value in known.items() if name.endswith(("Says", "Hears"))}
    travel = {record for union in named.values() for record in typing.get_args(union) or [union]}
    for module in (messages, server_messages, machine_records, member_messages):
        left = {kind.__name__ for kind in records_of(module) - travel}
        assert left <= INSIDE, left


def test_descriptors_beside_records_have_names() -> None:
    own = LaunchFds(spec=1, call=2, socket=3, stdout=4, stderr=5)
    assert StartFds.of([1, 2, 3, 4, 5], held=0) == (own, None, [])
    assert StartFds.of([1, 2, 3, 4, 5, 6], held=0) == (own, 6, [])
    assert StartFds.of([1, 2, 3, 4, 5, 7, 8], held=2) == (own, None, [7, 8])
    assert StartFds.of([1, 2, 3, 4, 5, 6, 7, 8], held=2) == (own, 6, [7, 8])
    assert LaunchFds.of([*own.there, 7], prepares=False) == (own, [7])
    prepared = own._replace(call=None)
    assert prepared.there == [1, 3, 4, 5]
    assert LaunchFds.of([*prepared.there, 7], prepares=True) == (prepared, [7])
    assert BoardFds.of([1]) == (1, None)
    assert BoardFds.of([1, 2, 3]) == (1, DirectFds(answers=2, all_there=3))
