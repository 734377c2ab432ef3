"""The streams of ranks that share a pipe or terminal: each write is of whole lines."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import select
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from mlaunch.rank import process
from mlaunch.rank.process import Text, WholeLines


class Written(io.FileIO):
    """Keeps each write."""

    def __init__(self) -> None:
        super().__init__(os.devnull, "wb")
        self.writes: list[bytes] = []

    def write(self, data: Any) -> int:
        self.writes.append(bytes(data))
        return len(data)


@pytest.fixture
def raw() -> Iterator[Written]:
    with Written() as found:
        yield found


@pytest.fixture
def text(raw: Written) -> Text:
    return Text(WholeLines(raw), encoding="utf-8", write_through=True)


def test_a_print_of_several_lines(raw: Written, text: Text) -> None:
    print("a\nb", file=text)
    print("c", "d", file=text)
    print("e", end="", file=text)
    assert raw.writes == [b"a\n", b"b\n", b"c d\n"]
    text.flush()
    assert raw.writes[3:] == [b"e"]


def test_lines_stay_whole_after_reconfigure(raw: Written, text: Text) -> None:
    text.reconfigure(line_buffering=True, errors="replace")
    print("a\nb", file=text)
    assert (raw.writes, text.errors) == ([b"a\n", b"b\n"], "replace")


def test_a_line_that_was_returned_from(raw: Written, text: Text) -> None:
    print("50%", end="\r", file=text)
    print("whole\n\r60%", end="", file=text)
    assert raw.writes == [b"50%\r", b"whole\n\r60%"]


def test_pieces_that_a_pipe_takes_at_once(raw: Written, text: Text) -> None:
    line, end = "x" * 1500 + "\n", "y" * 100
    text.write(end)
    text.write(line * 10 + end)
    text.flush()
    assert b"".join(raw.writes).decode() == end + line * 10 + end
    assert all(len(write) <= select.PIPE_BUF for write in raw.writes)
    assert all(write.endswith(b"\n") for write in raw.writes[:-1])


def test_a_line_longer_than_a_pipe_takes_at_once(raw: Written, text: Text) -> None:
    long = "x" * 100_000
    print(f"a\n{long}\nb", file=text)
    assert b"".join(raw.writes).decode() == f"a\n{long}\nb\n"


def test_bytes_below_the_text(raw: Written, text: Text) -> None:
    assert text.buffer.write(memoryview(b"a\nb")) == 3
    assert text.buffer.write(bytearray(b"\n")) == 1
    assert raw.writes == [b"a\n", b"b\n"]
    text.close()
    assert raw.writes == [b"a\n", b"b\n"]


class Interrupted(Exception):
    """What a handler raises."""


class Interruptions:
    """Handles a signal in three ways in turn, on the stream that the main thread writes to. ``said``: its own lines."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._log = logging.Logger("interruptions")
        self._log.addHandler(logging.StreamHandler(text))
        self._inside = 0
        self.count = 0
        self.said: list[str] = []

    def handle(self, _number: int, frame: FrameType | None) -> None:
        if self._inside > 2:  # a handler is interrupted, too
            return
        self._inside += 1
        self.count += 1
        try:
            prints = frame is not None and frame.f_code.co_filename == process.__file__
            if self.count % 3 == 0 and prints and self._inside == 1:
                raise Interrupted
            self._say(f"handler {self.count} " + "h" * 60)
        finally:
            self._inside -= 1

    def _say(self, line: str) -> None:
        if self.count % 2:  # in two writes
            print(line, file=self._text, flush=True)
        else:
            self._log.warning(line)
        self.said.append(line)


class SlowReader(threading.Thread):
    """Takes a little at a time, and interrupts the main thread each time, which mostly waits for it."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self.seen = bytearray()

    def run(self) -> None:
        while data := os.read(self._fd, select.PIPE_BUF):
            self.seen += data
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "times"), [(40, 10_000), (5000, 1000)]
)  # the second is more than a pipe takes at once
def test_handlers_print_while_their_thread_prints(size: int, times: int) -> None:
    readable, writable = os.pipe()
    written: list[str] = []
    with io.FileIO(writable, "wb") as raw:
        text = Text(WholeLines(raw), encoding="utf-8", write_through=True)
        interruptions, reader, number = Interruptions(text), SlowReader(readable), 0
        before = signal.signal(signal.SIGUSR1, interruptions.handle)
        reader.start()
        while interruptions.count < times:
            number += 1
            try:
                text.write(f"step {number} {'.' * size}\n")
                written.append(f"step {number} {'.' * size}")
            except Interrupted:
                continue
        _flush(text)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    reader.join()
    signal.signal(signal.SIGUSR1, before)
    os.close(readable)
    seen = reader.seen.decode()
    handlers = Counter(re.findall(r"handler \d+ h{60}(?=\n)", seen))
    assert [line for line in interruptions.said if handlers[line] != 1] == []
    if size < select.PIPE_BUF:  # else a handler may come in the middle of a line that is written in part
        lines = Counter(seen.split("\n")[:-1])
        assert [line for line in lines if not re.fullmatch(r"step \d+ \.{40}|handler \d+ h{60}", line)] == []
        assert [line for line in lines.keys() | {*written} if lines[line] != 1] == []


def _flush(text: Text) -> None:
    while True:
        with contextlib.suppress(Interrupted):
            text.flush()
            return
