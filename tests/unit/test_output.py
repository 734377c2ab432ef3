"""Lines, bars and merging, without ranks; and the relay on pipes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mlaunch.base import linux
from mlaunch.caller.output.bars import line
from mlaunch.caller.output.display import Display
from mlaunch.caller.output.lines import LINE_LIMIT, Splitter
from mlaunch.caller.output.merging import WINDOW, Merger
from mlaunch.caller.output.plan import OutputPlan, Policy
from mlaunch.caller.output.relay import Relay
from mlaunch.protocol.board import Loop


def test_lines_come_whole() -> None:
    splitter = Splitter()
    assert splitter.feed(b"a\nb") == [b"a"]
    assert splitter.feed(b"c\n\nd\xff\0") == [b"bc", b""]
    assert splitter.end() == [b"d\xff\0"]
    assert splitter.end() == []


def test_a_bar_is_one_line() -> None:
    splitter = Splitter()
    assert splitter.feed(b"\r 10%|#  |\r 50%") == []
    assert splitter.bar == b" 50%"
    assert splitter.feed(b"|## |") == []
    assert splitter.bar == b" 50%|## |"
    assert splitter.feed(b"\r100%|###|\nnext\r\n") == [b"100%|###|", b"next"]
    assert splitter.bar == b""


def test_a_bar_that_is_redrawn_for_hours() -> None:
    splitter = Splitter()
    for number in range(30_000):
        assert splitter.feed(b"\r%6d|" % number + b"#" * 100) == []
    assert splitter.bar == b" 29999|" + b"#" * 100
    assert splitter.feed(b"\n") == [b" 29999|" + b"#" * 100]


def test_a_very_long_line_comes_in_pieces() -> None:
    splitter = Splitter()
    assert splitter.feed(b"x" * (2 * LINE_LIMIT + 5)) == [b"x" * LINE_LIMIT] * 2
    assert splitter.feed(b"\n") == [b"x" * 5]


def lines(merger: Merger, now: float, *, everything: bool = False) -> list[tuple[list[int], bytes]]:
    return [(line.ranks, line.text) for line in merger.take(now, everything=everything)]


def test_equal_lines_are_shown_once() -> None:
    merger = Merger(3)
    for rank in (1, 0, 2):
        merger.add(rank, 1, b"same", 0.0)
    assert lines(merger, 0.0) == [([1, 0, 2], b"same")]
    assert merger.due is None


def test_a_line_waits_for_a_moment_only() -> None:
    merger = Merger(3)
    merger.add(0, 1, b"same", 0.0)
    merger.add(1, 1, b"same", 0.01)
    merger.add(2, 1, b"other", 0.02)
    assert lines(merger, 0.02) == []
    assert merger.due == WINDOW
    assert lines(merger, WINDOW) == [([0, 1], b"same")]
    assert lines(merger, WINDOW + 0.02) == [([2], b"other")]


def test_the_order_of_a_ranks_lines_is_kept() -> None:
    merger = Merger(2)
    for text in (b"a", b"b", b"a"):
        merger.add(0, 1, text, 0.0)
    merger.add(1, 1, b"b", 0.0)
    merger.add(1, 1, b"a", 0.0)
    merger.add(1, 2, b"a", 0.0)  # on the other stream
    assert lines(merger, 0.0, everything=True) == [([0], b"a"), ([0, 1], b"b"), ([0, 1], b"a"), ([1], b"a")]


def test_a_flood_does_not_wait() -> None:
    merger = Merger(2)
    for number in range(5000):
        merger.add(0, 1, b"%d" % number, 0.0)
    assert len(lines(merger, 0.0)) == 4000


def test_the_bar_of_all_ranks_names_the_slowest() -> None:
    """By its global rank."""
    found = [Loop(2, done, 5.0, 10, 1.0, "epoch") for done in (4, 6)]
    text = line([*found, Loop(1, 10, 5.0, 10, 0.0, "before")], 2, rank_start=8)
    assert "epoch:   0%" in text
    assert "rank 10 is 6 behind" in text


class Place:
    """Where lines are replaced."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.left: list[str] | None = None

    def show(self, text: str) -> None:
        self.shown.append(text)

    def hide(self) -> None:
        pass

    def close(self, lines: list[str]) -> None:
        self.left = lines


def test_launches_at_the_same_time_do_not_draw_over_each_other() -> None:
    first, second = Place(), Place()
    displays = [Display(place, 0.0) for place in (first, second)]
    for display in displays:
        display.draw(["line"], 1.0)
    assert (first.shown, second.shown) == (["line"], [])
    displays[0].close(["last"])
    displays[1].draw(["line"], 2.0)
    displays[1].close(["last"])
    assert (first.left, second.shown, second.left) == (["last"], ["line"], ["last"])


def test_a_place_that_breaks_is_free_again() -> None:
    class Broken(Place):
        def close(self, lines: list[str]) -> None:
            super().close(lines)
            raise BrokenPipeError

    display, place = Display(Broken(), 0.0), Place()
    display.draw(["line"], 1.0)
    with pytest.raises(BrokenPipeError):
        display.close([])
    later = Display(place, 0.0)
    later.draw(["line"], 2.0)
    later.close([])
    assert place.shown == ["line"]


class Pipes:
    """A relay with a pipe for each stream of each rank."""

    def __init__(self, plan: OutputPlan, size: int) -> None:
        self.relay = Relay(plan, size, 0, lambda: 0.0)
        self._writers: dict[tuple[int, int], int] = {}
        for rank in range(size):
            ends = {stream: os.pipe() for stream in plan.carried(rank)}
            self._writers |= {(rank, stream): writer for stream, (_, writer) in ends.items()}
            self.relay.adopt(rank, rank, [reader for reader, _ in ends.values()])

    def write(self, rank: int, stream: int, data: bytes) -> None:
        os.write(self._writers[rank, stream], data)

    def finish(self) -> None:
        for writer in self._writers.values():
            os.close(writer)
        self.relay.finish()
        self.relay.close()


def prefix(ranks: Sequence[int]) -> str:
    return f"[{','.join(map(str, sorted(ranks)))}] "


def plan(size: int, policy: Policy, directory: Path | None = None) -> OutputPlan:
    policies = {(rank, stream): policy for rank in range(size) for stream in (1, 2)}
    return OutputPlan(policies, prefix, None if directory is None else str(directory))


def test_the_relay_shows_and_keeps(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    pipes = Pipes(plan(2, Policy(kept=True), tmp_path), 2)
    pipes.write(0, 1, b"hello\n")
    pipes.write(1, 1, b"hello\nraw \xff")
    pipes.write(1, 2, b"\r 50%\r100%\n")
    pipes.finish()
    shown = capfdbinary.readouterr()
    assert shown.out == b"[0,1] hello\n[1] raw \xff\n"
    assert shown.err == b"[1] 100%\n"
    assert (tmp_path / "attempt_0" / "1" / "stdout.log").read_bytes() == b"hello\nraw \xff"
    assert (tmp_path / "attempt_0" / "1" / "stderr.log").read_bytes() == b"\r 50%\r100%\n"


def test_a_stream_of_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's has no bytes."""
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    pipes = Pipes(plan(1, Policy()), 1)
    pipes.write(0, 1, b"raw \xff\0\n")
    pipes.finish()
    assert shown.getvalue() == "[0] raw \\xff\0\n"


@pytest.mark.parametrize("gone", [None, "closed"])
def test_no_stream_to_show_it_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gone: str | None) -> None:
    stream = None
    if gone:
        stream = io.StringIO()
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    pipes = Pipes(plan(1, Policy(kept=True), tmp_path), 1)
    pipes.write(0, 1, b"not shown\n" * 3)
    pipes.finish()
    assert (tmp_path / "attempt_0" / "0" / "stdout.log").read_bytes() == b"not shown\n" * 3


def test_the_relay_returns_when_it_is_wanted_elsewhere() -> None:
    pipes = Pipes(plan(1, Policy(shown=False)), 1)
    reader, writer = os.pipe()
    os.write(writer, b"x")
    pipes.relay.watch(reader)
    assert linux.wait_readable([pipes.relay.fileno()], 10)
    assert pipes.relay.carry() == {reader}
    pipes.finish()
    os.close(reader)
    os.close(writer)
