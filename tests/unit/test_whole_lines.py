"""The streams of ranks that share a pipe or terminal: each write is of whole lines."""

from __future__ import annotations

import io
import os
import select
from collections.abc import Iterator
from typing import Any

import pytest

from mlaunch.rank.whole_lines import Text, WholeLines


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
