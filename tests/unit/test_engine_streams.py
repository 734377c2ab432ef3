"""What engines carry: records with contents over any byte stream, several streams over one, what ranks print."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from mlaunch.engines.caller.machines import last_lines
from mlaunch.engines.caller.merged_agent import Backlog
from mlaunch.engines.member.machine_launch import CallersHeartbeat, MachineLaunch
from mlaunch.engines.wire import Alive, FromAgent, Heartbeat, MachineDone, Printed
from mlaunch.engines.wire.first_process import Mux
from mlaunch.engines.wire.frame_stream import Content, ForgedError, FrameCodes, FrameStream, NoiseError
from mlaunch.protocol.board import Board
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import Finished, Phase, Question, RanksStarting, RankStarted, Told


@dataclass(frozen=True)
class Word:
    text: str


@contextlib.contextmanager
def pair(secret: str = "") -> Iterator[tuple[FrameStream, FrameStream]]:
    """A caller's end and a member's."""
    ours, theirs = socket.socketpair()
    ends = [FrameStream(os.dup(end.fileno()), end.detach(), secret, member=end is theirs) for end in (ours, theirs)]
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()


def memfd(data: bytes) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(fd, data)
    return fd


def content_of(fd: int) -> bytes:
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()


@pytest.mark.parametrize("secret", ["", "secret"])
def test_records_come_with_their_contents_in_order(secret: str) -> None:
    large = random.Random(1).randbytes(3 << 20)
    with pair(secret) as (one, other):
        for data in (b"", b"\n", large, b"x"):
            fd = memfd(data)
            one.send(Word(f"{len(data)} bytes"), fd if data else -1)
            os.close(fd)
        found = []
        while len(found) < 4:
            one.flush()
            found += other.receive()
        assert [record.text for record, _ in found] == ["0 bytes", "1 bytes", f"{len(large)} bytes", "1 bytes"]
        assert [content_of(fd) if fd >= 0 else b"" for _, fd in found] == [b"", b"\n", large, b"x"]
        assert one.unsent == 0


@pytest.mark.parametrize("secret", ["", "secret"])
def test_a_frame_that_comes_byte_by_byte(secret: str) -> None:
    with pair(secret) as (one, other):
        fd = memfd(b"content")
        one.send(Word("slow"), fd)
        os.close(fd)
        data = os.read(other.incoming, 1 << 16)
        found = []
        for byte in data:
            os.write(one.outgoing, bytes([byte]))
            found += other.receive()
        [(record, content)] = found
        assert (record, content_of(content)) == (Word("slow"), b"content")


def test_all_that_comes_counts_as_a_heartbeat() -> None:
    """Also a part of something large, and nothing that is only looked for."""
    with pair() as (one, other):
        heartbeat = CallersHeartbeat(other)
        assert heartbeat.milliseconds() is None
        assert not heartbeat.over
        heartbeat.last = Heartbeat(1000.0, ())
        fd = memfd(bytes(1 << 22))
        one.send(Word("large"), fd)
        os.close(fd)
        for _ in range(2):  # the head, with what came beside it; then more of the content
            other.heard_at -= 2000.0
            assert not heartbeat.over  # it was not read yet
            assert heartbeat.milliseconds() == 0.0
            assert other.receive() == []
            assert heartbeat.left > 900.0
            one.flush()
        while not (found := other.receive()):
            one.flush()
        os.close(found[0][1])
        other.heard_at -= 2000.0
        assert other.receive() == []
        assert heartbeat.over


def test_a_carrying_process_without_a_machine_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those here have ended, and of the other side, which is cut off, nothing comes."""
    monkeypatch.setattr("mlaunch.engines.wire.first_process._LAST_WORDS_TIMEOUT", 0.0)
    with pair() as (one, _):
        ours, theirs = socket.socketpair()
        theirs.close()
        Mux(one, {0: ours}).run()
        assert ours.fileno() == -1


@pytest.mark.parametrize(
    ("words", "last"),
    [
        ("", []),
        ("a\nb", ["a", "b"]),
        ("a\nb\nc\nd", ["b", "c", "d"]),
        ("mlaunch: 1\nmlaunch: 2\na\nb\nc", ["mlaunch: 2", "b", "c"]),
        ("mlaunch: 1\nmlaunch: 2\na\nb", ["mlaunch: 2", "a", "b"]),
        ("a\nmlaunch: 1\nb\nc", ["mlaunch: 1", "b", "c"]),
    ],
)
def test_the_last_words_of_a_member(words: str, last: list[str]) -> None:
    assert last_lines(words) == last


def test_an_end_that_is_closed_is_told_after_what_it_sent() -> None:
    with pair() as (one, other):
        one.send(Word("last"))
        os.close(one.outgoing)
        one.outgoing = os.open(os.devnull, os.O_WRONLY)
        os.close(one.incoming)
        one.incoming = os.open(os.devnull, os.O_RDONLY)
        assert [record for record, _ in other.receive()] == [Word("last")]
        with pytest.raises(EOFError):
            other.receive()
        other.send(Word("to nobody"))
        assert other.unsent == 0


def test_a_stream_that_is_closed_owns_nothing() -> None:
    """What has taken its numbers since is not closed in a fork of this process, which closes streams."""
    with pair() as (one, _):
        one.close()
        taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
        fork = os.fork()
        if fork == 0:
            os._exit(sum(not os.path.exists(f"/proc/self/fd/{fd}") for fd in taken))
        assert os.waitpid(fork, 0)[1] == 0
        for fd in taken:
            os.close(fd)


def test_content_is_released_once() -> None:
    content = Content(b"record", 3, FrameCodes("", "member").of_content())
    assert not content.take(bytearray(b"ab"))
    assert content.take(rest := bytearray(b"cd"))
    assert rest == b"d"
    fd = content.release()
    content.close()  # the receiver owns the file now
    assert content_of(fd) == b"abc"


def test_content_that_has_half_come_is_closed_with_its_stream() -> None:
    with pair() as (one, other):
        os.write(one.outgoing, struct.pack("!IQ", 1, 100) + b"r" + b"half of it")
        assert other.receive() == []
        content = other._content
        assert content is not None
        fd = content._fd
        assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
        other.close()
        assert not os.path.exists(f"/proc/self/fd/{fd}")


@pytest.mark.parametrize("side", ["incoming", "outgoing"])
def test_a_carrying_process_reads_no_more_than_can_be_passed_on(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    monkeypatch.setattr("mlaunch.engines.wire.first_process._FULL", 10)
    with pair() as (one, other):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            mux = Mux(one, {0: ours})
            theirs.sendall(b"x")
            os.write(other.outgoing, b"x")
            assert set(mux._wait()) == {one.incoming, ours.fileno()}
            if side == "incoming":
                mux._ends[0].waiting += bytes(11)
                assert one.incoming not in mux._wait()
            else:
                monkeypatch.setattr(FrameStream, "unsent", 11)
                assert mux._wait().get(ours.fileno(), 0) == 0


def launch_of(stream: FrameStream, monkeypatch: pytest.MonkeyPatch) -> tuple[MachineLaunch, Channel[Any, Any]]:
    """Makes a launch of one rank, and the end of its agent, which says what a test lets it say."""
    monkeypatch.setattr("mlaunch.engines.member.machine_launch._ROWS_DELAY", 0.01)
    monkeypatch.setattr("mlaunch.engines.member.machine_launch.replace", lambda spec, **_: spec)
    agent, launcher = Channel[Any, Any].pair()
    server: Any = SimpleNamespace(launch=lambda _spec, _call: launcher, kill=lambda: None)
    spec: Any = SimpleNamespace(
        grace_period=1.0, seconds=None, streams=lambda _: (1,), rank_start=0, local_world_size=1, launch_id="full",
        context=SimpleNamespace(environ={}), callers_signals=(),
    )  # fmt: skip
    parts: Any = SimpleNamespace(spec=spec, last_words=lambda _spec: ())
    return MachineLaunch(stream, parts, server, -1, CallersHeartbeat(stream)), agent


def test_a_machine_whose_ranks_say_nothing_answers_each_sign_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be told of as one that does not answer, once its ranks compute for longer than its timeout."""
    with pair() as (caller, stream):
        launch, agent = launch_of(stream, monkeypatch)
        with contextlib.closing(agent):
            for _ in range(3):
                caller.send(Heartbeat(1000.0, ()))
                caller.heard_at -= 2000.0
                launch._step()
                assert [type(record) for record, _ in caller.receive()] == [Alive]
                assert caller.heard_at > time.monotonic() - 1000.0
            assert stream.heard_at > time.monotonic() - 1000.0
            launch._close()


def test_an_agent_is_asked_what_it_does_once_it_has_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it joins the other machines, and any word would be the end: nothing is known of it then."""
    board, status = Board.create(1), memfd(b"{}")
    with pair() as (caller, stream):
        launch, agent = launch_of(stream, monkeypatch)
        with contextlib.closing(agent):
            caller.send(Question(1, b"status"))
            launch._step()
            assert caller.receive() == [(FromAgent(Told(1)), -1)]
            agent.send(RanksStarting(0.0, "full", 0, 1), [board.fd])
            launch._step()
            caller.send(Question(2, b"why"))
            launch._step()
            assert agent.receive() == (Question(2, b"why"), [])
            agent.send(Told(2), [status])
            launch._step()
            told = [(record, content_of(fd)) for record, fd in caller.receive() if fd >= 0]
            assert told == [(FromAgent(Told(2)), b"{}")]
            launch._close()
    os.close(status)
    board.close()


def test_all_that_is_in_a_pipe_is_passed_on_after_the_agents_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board.create(1)
    hear, printed = os.pipe()
    size = os.write(printed, bytes(1 << 16))  # more than is read at once
    os.close(printed)
    with pair() as (caller, stream):
        launch, agent = launch_of(stream, monkeypatch)
        with contextlib.closing(agent):
            agent.send(RanksStarting(0.0, "full", 0, 1), [board.fd])
            agent.send(RankStarted(0, 1, 0.0), [hear])
            agent.send(Finished())
            monkeypatch.setattr(launch, "_send_last_words", lambda: None)
            launch.run()
        found = [record for record, _ in caller.receive()]
        while not isinstance(found[-1], MachineDone):
            stream.flush()
            found += [record for record, _ in caller.receive()]
    assert sum(len(record.data) for record in found if isinstance(record, Printed)) == size
    os.close(hear)
    board.close()


@pytest.mark.slow
def test_ranks_wait_that_print_more_than_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads; what waits for that stays within the limit, and the rest in the pipe of who prints it."""
    monkeypatch.setattr("mlaunch.engines.member.machine_launch._FULL", 1 << 18)
    board = Board.create(1)
    hear, printed = os.pipe()
    os.set_blocking(printed, False)
    with pair() as (stream, _):
        launch, agent = launch_of(stream, monkeypatch)
        agent.send(RanksStarting(0.0, "full", 0, 1), [board.fd])
        agent.send(RankStarted(0, 1, 0.0), [hear])
        for _ in range(100):  # in which 3 MB are printed, if nobody minds
            with contextlib.suppress(BlockingIOError):
                os.write(printed, bytes(1 << 16))
            launch._step()
        assert 1 << 18 <= stream.unsent < 1 << 19
        launch._close()
        agent.close()
    for fd in (hear, printed):
        os.close(fd)
    board.close()


def test_bytes_before_the_first_word_are_dropped() -> None:
    with pair() as (one, other):
        os.write(one.outgoing, b"Welcome to host7!\nLast login: yesterday\nmark {")
        assert other.skip_to(b"mark ") is None
        os.write(one.outgoing, b"}\n")
        one.send(Word("next"))
        assert other.skip_to(b"mark ") == b"{}"
        assert [record for record, _ in other.receive()] == [Word("next")]


@pytest.mark.parametrize("frame_before", [False, True])
def test_something_else_than_a_frame_is_an_error(*, frame_before: bool) -> None:
    with pair() as (one, other):
        if frame_before:
            data = pickle.dumps(Word("x"))
            os.write(one.outgoing, struct.pack("!IQ", len(data), 0) + data)
        os.write(one.outgoing, b"You have new mail" * 3)
        with pytest.raises(NoiseError, match=r"wrote something that is not from mlaunch .* beginning b'You have"):
            other.receive()


class Marks:
    """Leaves a sign if somebody unpickles it."""

    seen = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Marks.see, ()

    @staticmethod
    def see() -> None:
        Marks.seen = True


def frames(count: int) -> list[bytes]:
    """What a caller sends to a member whose secret it knows: a record each, with a content."""
    found = []
    with pair("secret") as (one, other):
        for number in range(count):
            fd = memfd(b"content %d" % number)
            one.send(Marks(), fd)
            os.close(fd)
            found.append(os.read(other.incoming, 1 << 16))
    return found


FORGERIES = {
    "left out": lambda _, second: second,
    "sent again": lambda first, _: first + first,
    "in another order": lambda first, second: second + first,
    "a size": lambda first, _: first[:11] + bytes([first[11] ^ 1]) + first[12:],
    "a record": lambda first, _: first[:30] + bytes([first[30] ^ 1]) + first[31:],
    "a content": lambda first, _: first[:-34] + bytes([first[-34] ^ 1]) + first[-33:],
    "another's content": lambda first, second: first[:-42] + second[-42:],
}


@pytest.mark.parametrize("forged", FORGERIES)
def test_a_record_that_somebody_else_has_changed_is_not_unpickled(forged: str) -> None:
    first, second = frames(2)
    with pair("secret") as (one, other):
        os.write(one.outgoing, FORGERIES[forged](first, second))
        if forged == "sent again":
            [(_, content)] = other.receive(1)
            os.close(content)
        Marks.seen = False
        for _ in range(2):  # for ever
            with pytest.raises(ForgedError, match="sent data with a wrong code"):
                other.receive()
        assert not Marks.seen


def test_a_record_that_is_turned_back_is_not_unpickled() -> None:
    """Nor what bears the codes of another secret, nor none, nor a first line that somebody else has written."""
    [ours] = frames(1)
    data = pickle.dumps(Marks())
    for secret, turned in (
        ("secret", ours),
        ("another", ours),
        ("secret", struct.pack("!IQ", len(data), 0) + data * 2),
    ):
        with pair(secret) as (one, other):
            os.write(*((other.outgoing, turned) if secret == "secret" else (one.outgoing, turned)))
            Marks.seen = False
            with pytest.raises(ForgedError):
                (one if secret == "secret" else other).receive()
            assert not Marks.seen
    with pair("secret") as (one, other):
        os.write(other.outgoing, b"mark " + b"0" * 64 + b"{}\n")
        with pytest.raises(ForgedError):
            one.skip_to(b"mark ")


def test_the_first_line_bears_a_code() -> None:
    with pair("secret") as (one, other):
        other.write_line(b"mark ", b"{}")
        other.send(Word("next"))
        assert one.skip_to(b"mark ") == b"{}"
        assert [record for record, _ in one.receive()] == [Word("next")]


def test_several_streams_over_one() -> None:
    """Also what is larger than any buffer between, and each stream's end."""
    inner = [socket.socketpair() for _ in range(2)]
    outer = [socket.socketpair() for _ in range(2)]
    with pair() as (one, other):
        muxes = [
            Mux(one, {number: pair[1] for number, pair in enumerate(inner)}),
            Mux(other, {number: pair[1] for number, pair in enumerate(outer)}),
        ]
        threads = [threading.Thread(target=mux.run, daemon=True) for mux in muxes]
        for thread in threads:
            thread.start()
        texts = [random.Random(number).randbytes(6 << 20) for number in range(2)]
        writers = [threading.Thread(target=say, args=(inner[i][0], texts[i]), daemon=True) for i in range(2)]
        for writer in writers:
            writer.start()
        with ThreadPoolExecutor(2) as readers:  # who does not read one of them holds up both
            assert list(readers.map(heard, [end for end, _ in outer])) == texts
        for number in range(2):
            say(outer[number][0], b"answer")
        assert [heard(inner[i][0]) for i in range(2)] == [b"answer"] * 2
        for thread in (*threads, *writers):
            thread.join(30)
            assert not thread.is_alive()
    for end, _ in (*inner, *outer):
        end.close()


def say(end: socket.socket, data: bytes) -> None:
    end.sendall(data)
    end.shutdown(socket.SHUT_WR)


def heard(end: socket.socket) -> bytes:
    with end.makefile("rb") as file:
        return file.read()


def test_output_of_ranks_waits_for_its_reader() -> None:
    backlog = Backlog()
    [reader] = backlog.open(3, [1])
    most = 1 << 20
    for _ in range(5):
        backlog.add(3, 1, b"x" * most)
    assert backlog.full
    assert backlog.blocked()
    backlog.limit = None
    assert not backlog.full
    backlog.add(3, 2, b"of a stream that is not ours")
    backlog.end([3])
    size = 0
    while data := os.read(reader, most):
        size += len(data)
        backlog.flush()
    assert size == 5 * most
    assert not backlog.blocked()
    os.close(reader)
    [reader] = backlog.open(4, [1])
    os.close(reader)
    backlog.add(4, 1, b"to nobody")
    backlog.close()


def test_unread_output_is_dropped_once_nobody_waits_and_its_size_is_told() -> None:
    backlog = Backlog()
    [reader] = backlog.open(3, [1])
    backlog.limit = None
    for _ in range(6):
        backlog.add(3, 1, b"x" * (1 << 20))
    found = bytearray()
    backlog.end([3])
    while data := os.read(reader, 1 << 20):
        found += data
        backlog.flush()
    kept, _, words = found.partition(b"\n")
    lost = 6 * (1 << 20) - len(kept)
    assert 0 < lost <= 2 << 20
    assert words.decode() == f"mlaunch: {lost} bytes that were printed here are lost: nobody read\n"
    os.close(reader)
    backlog.close()


def test_rows_of_a_board_go_to_another_machines_clock() -> None:
    here, there = Board.create(3), Board.create(1)
    there.phase_writer(0)(Phase.RUNNING)
    there.begin_loop(0, 10, "epochs")
    there.count(0, 4)
    assert 8 * len(there.row(0)) < os.fstat(there.fd).st_size  # not what the rank has noted of its output
    here.take_row(2, there.row(0), 100.0)
    assert here[2] is Phase.RUNNING
    assert (here.loop(2).done, here.loop(2).description) == (4, "epochs")
    assert here.loop(2).start == there.loop(0).start + 100.0
    assert [at for at in here.times(2) if at] == [at + 100.0 for at in there.times(0) if at]
    assert not any(here.times(1))
    here.close()
    there.close()
