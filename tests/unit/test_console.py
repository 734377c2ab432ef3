"""What is shown goes where it is read, when it is read: pipes, terminals and stream objects without ranks."""

from __future__ import annotations

import io
import os
import pty
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlaunch.caller import interrupts
from mlaunch.caller.output import console
from mlaunch.caller.output.console import Console
from mlaunch.caller.output.output_plan import OutputPlan, Policy
from mlaunch.caller.output.relay import Relay

TEXT = b"".join(b"line %d\n" % number for number in range(60_000))  # more than a pipe, a terminal or a socket holds


def read(fd: int, size: int) -> bytes:
    found = b""
    while len(found) < size:
        found += os.read(fd, size - len(found))
    return found


def pipe() -> tuple[int, int]:
    return os.pipe()


def terminal() -> tuple[int, int]:
    reader, writer = pty.openpty()
    import tty

    tty.setraw(writer)
    return reader, writer


def sockets() -> tuple[int, int]:
    reader, writer = socket.socketpair()
    return reader.detach(), writer.detach()


@pytest.fixture
def shown() -> Iterator[Console]:
    made = Console()
    yield made
    made.close()


Ends = Callable[[], tuple[int, int]]


@pytest.mark.parametrize("ends", [pipe, terminal, sockets])
@pytest.mark.parametrize("buffered", [True, False])
def test_text_that_nobody_reads_waits(
    monkeypatch: pytest.MonkeyPatch, shown: Console, ends: Ends, buffered: bool
) -> None:
    """And comes whole and in its order when somebody does."""
    reader, writer = ends()
    raw = io.FileIO(writer, "w")
    file = io.TextIOWrapper(io.BufferedWriter(raw) if buffered else raw)  # type: ignore[type-var]
    monkeypatch.setattr(sys, "stdout", file)
    shown.write(1, TEXT)
    shown.write(2, b"")
    shown.write(1, b"last\n")
    assert shown.blocked is not None
    assert not shown.drain()
    assert os.get_blocking(writer)  # others have this open file, too
    waiting = threading.Thread(target=shown.wait)
    waiting.start()
    assert read(reader, len(TEXT) + 5) == TEXT + b"last\n"
    waiting.join(60)
    assert shown.blocked is None
    file.close()
    os.close(reader)


def test_a_file_is_written_where_it_was(monkeypatch: pytest.MonkeyPatch, shown: Console, tmp_path: Path) -> None:
    with open(tmp_path / "log", "w+") as file:
        monkeypatch.setattr(sys, "stdout", file)
        file.write("before\n")
        shown.write(1, TEXT)
        file.write("after\n")
        file.flush()
    assert (tmp_path / "log").read_bytes() == b"before\n" + TEXT + b"after\n"


def test_later_text_goes_to_the_stream_of_that_moment(
    monkeypatch: pytest.MonkeyPatch, shown: Console, tmp_path: Path
) -> None:
    """As from one cell of a notebook, or one test, to the next."""
    for name in ("first", "second"):
        with open(tmp_path / name, "w") as file:
            monkeypatch.setattr(sys, "stdout", file)
            shown.write(1, name.encode())
    assert [(tmp_path / name).read_text() for name in ("first", "second")] == ["first", "second"]


def test_a_reader_that_does_not_read_is_given_up(
    monkeypatch: pytest.MonkeyPatch, shown: Console, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(console, "_READER_TIMEOUT", 0.0)
    reader, writer = os.pipe()
    with open(writer, "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        shown.write(1, TEXT)
        shown.write(2, b"and stderr\n")
        shown.wait(until=0.0)
        shown.write(1, b"more")
        assert shown.blocked is None
        shown.finish(until=0.0)
        size = len(TEXT) + len("more") - len(os.read(reader, len(TEXT)))
    os.close(reader)
    said = f"mlaunch: nobody reads stdout; the last {size} bytes of what ranks printed there are not shown\n"
    assert capfdbinary.readouterr().err.decode() == "and stderr\n" + said


class Odd(io.StringIO):
    """Of a user's own making."""

    def __init__(self, writing: Callable[[], object]) -> None:
        super().__init__()
        self._writing = writing

    def write(self, text: str) -> int:
        self._writing()
        return super().write(text)


def test_a_stream_object_may_raise_anything(monkeypatch: pytest.MonkeyPatch, shown: Console) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(sys, "stdout", Odd(fail))
    other = io.StringIO()
    monkeypatch.setattr(sys, "stderr", other)
    shown.write(1, b"lost")
    shown.write(1, b"lost")
    shown.write(2, b"kept")
    assert other.getvalue() == "kept"
    shown.raise_interrupt()  # there is none


def test_a_stream_object_that_has_raised_is_not_asked_for_what_waits(
    monkeypatch: pytest.MonkeyPatch, shown: Console
) -> None:
    asked: list[None] = []

    def fail() -> None:
        asked.append(None)
        raise RuntimeError("no")

    reader, writer = os.pipe()
    with open(writer, "w") as file:
        monkeypatch.setattr(sys, "stdout", Odd(fail))
        monkeypatch.setattr(sys, "stderr", file)
        shown.write(2, TEXT)
        for _ in range(3):
            shown.write(1, b"after it")
        waiting = threading.Thread(target=shown.wait)
        waiting.start()
        assert read(reader, len(TEXT)) == TEXT
        waiting.join(60)
    os.close(reader)
    assert len(asked) == 1


def test_one_interrupt_ends_a_stream_object_that_waits(monkeypatch: pytest.MonkeyPatch, shown: Console) -> None:
    """The interrupt comes out where nothing is in flight, and the object is not asked again."""
    monkeypatch.setattr(console, "_READER_TIMEOUT", 0.0)
    asked: list[None] = []

    def hang() -> None:
        asked.append(None)
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()

    monkeypatch.setattr(sys, "stdout", Odd(hang))
    with interrupts.deferred():
        shown.write(1, b"first")
        shown.write(1, b"second")
        assert len(asked) == 1
        with pytest.raises(KeyboardInterrupt):
            shown.raise_interrupt()
        shown.raise_interrupt()


class Interrupted(io.TextIOWrapper):
    """Gets Ctrl-C while it writes what others have written, once."""

    pending = True

    def flush(self) -> None:
        if self.pending:
            self.pending = False
            os.kill(os.getpid(), signal.SIGINT)
        super().flush()


@pytest.mark.parametrize("raw", ["file", "socket"])
def test_an_interrupt_before_a_write_loses_and_doubles_nothing(
    monkeypatch: pytest.MonkeyPatch, shown: Console, raw: str
) -> None:
    """``file``: one of which we have a way of our own; ``socket``: an object that is asked as it is."""
    ours, theirs = socket.socketpair()
    binary = open(ours.detach(), "wb") if raw == "file" else ours.makefile("wb")  # noqa: SIM115 - the text closes it
    with Interrupted(binary) as text, theirs:
        monkeypatch.setattr(sys, "stdout", text)
        with interrupts.deferred():
            shown.write(1, b"first\n")
            shown.write(1, b"second\n")
            with pytest.raises(KeyboardInterrupt):
                shown.wait()
            shown.wait()
        assert theirs.recv(100) == b"first\nsecond\n"
    ours.close()


def test_a_copying_stream_gets_its_copy(monkeypatch: pytest.MonkeyPatch, shown: Console) -> None:
    """One that passes on whatever else it is asked for, ``buffer`` among it."""
    copied: list[str] = []

    class Tee:
        def write(self, text: str) -> None:
            copied.append(text)

        def __getattr__(self, name: str) -> object:
            return getattr(sys.__stdout__, name)

    monkeypatch.setattr(sys, "stdout", Tee())
    shown.write(1, b"text\n")
    assert copied == ["text\n"]


def write_now(fd: int, data: bytes) -> int:
    try:
        return os.write(fd, data)
    except BlockingIOError:
        return 0


def test_ranks_wait_for_who_reads_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In their pipes, not in memory; what is kept in files alone goes on."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    policies = {(0, 1): Policy(), (0, 2): Policy(shown=False, kept=True)}
    relay = Relay(OutputPlan(policies, lambda _: "", str(tmp_path)), 1, 0)
    pipes = [os.pipe() for _ in range(2)]
    for _, end in pipes:
        os.set_blocking(end, False)
    relay.adopt(0, 0, [end for end, _ in pipes])
    printed, shown = 0, b""
    with open(writer, "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        while written := write_now(pipes[0][1], b"x" * 4095 + b"\n"):
            printed += written
            relay.carry()
        assert printed <= 4 << 16
        os.write(pipes[1][1], b"kept\n")
        relay.carry()
        assert (tmp_path / "attempt_0" / "0" / "stderr.log").read_text() == "kept\n"
        while len(shown) < printed:
            relay.carry()
            shown += os.read(reader, 1 << 20)
        for _, end in pipes:
            os.close(end)
        relay.finish()
    relay.close()
    os.close(reader)
