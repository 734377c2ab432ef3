"""Lines, bars and merging, without ranks; and the relay on pipes."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import os
import select
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mlaunch.base import linux
from mlaunch.caller.output import relay
from mlaunch.caller.output.console import LiveLines, StartingLine
from mlaunch.caller.output.lines import LINE_LIMIT, WINDOW, LineSplitter, Merger, Tails, WriteTimes
from mlaunch.caller.output.output_plan import OutputPlan, Policy
from mlaunch.caller.output.relay import Relay
from mlaunch.display import caller, wire
from mlaunch.display.caller import loop_line
from mlaunch.display.caller.areas import Area
from mlaunch.protocol.board import Board, Loop
from mlaunch.rank.process import StampedFile


def test_lines_come_whole() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"a\nb") == [b"a"]
    assert splitter.feed(b"c\n\nd\xff\0") == [b"bc", b""]
    assert splitter.end() == [b"d\xff\0"]
    assert splitter.end() == []


def test_a_bar_is_one_line() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"\r 10%|#  |\r 50%") == []
    assert splitter.bars == [b" 50%"]
    assert splitter.feed(b"|## |") == []
    assert splitter.bars == [b" 50%|## |"]
    assert splitter.feed(b"\r100%|###|\nnext\r\n") == [b"100%|###|", b"next"]
    assert splitter.bars == []


def test_a_bar_that_goes_away_leaves_nothing() -> None:
    """As tqdm's with ``leave=False``."""
    splitter = LineSplitter()
    assert splitter.feed(b"\r 50%|## |\r          \r") == []
    assert splitter.bars == []
    assert splitter.feed(b"next\nafter") == [b"next"]
    assert splitter.end() == [b"after"]
    splitter.feed(b"\r 50%|## |\r          \r")
    assert splitter.end() == []
    splitter.feed(b"   ")
    assert splitter.end() == [b"   "]


def test_bars_below_bars() -> None:
    """As tqdm draws them, in pieces as they may come."""
    splitter = LineSplitter()
    for piece in (b"\r 0% outer", b"\n", b"\r 0% inner", b"\x1b[A", b"\n\n\r 5% third\x1b[A\x1b[A", b"\n\r50% inner"):
        assert splitter.feed(piece) == []
    assert splitter.feed(b"\x1b[A") == []
    assert splitter.bars == [b" 0% outer", b"50% inner", b" 5% third"]
    assert splitter.feed(b"\n\r         \x1b[A\n\n\r         \x1b[A\x1b[A\r100% outer") == []
    assert splitter.bars == [b"100% outer"]
    assert splitter.feed(b"\n") == []
    assert splitter.holding
    assert splitter.feed(b"\r 0% next") == []
    assert splitter.feed(b"\r 9% next") == [b"100% outer"]
    assert splitter.end() == [b" 9% next"]


def test_a_bar_that_may_be_returned_to_waits_for_a_moment(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    pipes = Pipes(plan(1, Policy()), 1)
    pipes.write(0, 1, b"\r 50%\r100%\n")
    pipes.relay.carry()
    assert capfdbinary.readouterr().out == b""
    assert pipes.relay.timeout() == WINDOW
    pipes.now = WINDOW
    pipes.relay.carry()
    assert capfdbinary.readouterr().out == b"[0] 100%\n"
    assert pipes.relay.timeout() is None
    pipes.finish()


def test_a_bar_that_is_redrawn_for_hours() -> None:
    splitter = LineSplitter()
    for number in range(30_000):
        assert splitter.feed(b"\r%6d|" % number + b"#" * 100) == []
    assert splitter.bars == [b" 29999|" + b"#" * 100]
    assert splitter.feed(b"\nnext") == [b" 29999|" + b"#" * 100]


def test_colours_that_a_line_leaves_on_end_with_it() -> None:
    splitter = LineSplitter()
    lines = splitter.feed(b"\x1b[1;31mred\nstill\x1b[4m\n\x1b[0mplain\n\x1b[32mgreen\x1b[m\nplain\n")
    red, line = b"\x1b[1;31m", b"\x1b[4m"
    assert lines == [
        red + b"red\x1b[0m",
        red + b"still" + line + b"\x1b[0m",
        red + line + b"\x1b[0mplain",
        b"\x1b[32mgreen\x1b[m",
        b"plain",
    ]
    for _ in range(100):  # as a program does that never switches one off
        assert splitter.feed(b"\x1b[31mx\n\x1b[32my\n")[-1].count(b"\x1b[") <= 5
    splitter.feed(b"\x1b[33munfinished")
    assert splitter.end()[0].endswith(b"unfinished\x1b[0m")


def test_a_very_long_line_comes_in_pieces() -> None:
    splitter = LineSplitter()
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


def test_a_line_after_which_its_ranks_printed_nothing_may_be_shown_later() -> None:
    merger = Merger(3)
    for rank, text in ((1, b"a"), (1, b"b"), (0, b"c"), (2, b"b"), (0, b"a"), (0, b"b")):
        merger.add(rank, 1, text, 0.0)
    wanted = [([1], b"a"), ([0], b"c"), ([0], b"a"), ([1, 2, 0], b"b")]
    assert lines(merger, 0.0, everything=True) == wanted


def test_a_flood_does_not_wait() -> None:
    merger = Merger(2)
    for number in range(5000):
        merger.add(0, 1, b"%d" % number, 0.0)
    assert len(lines(merger, 0.0)) == 4000


def test_a_rank_that_repeats_a_line() -> None:
    """Of two that it printed, each is one of those that the others printed."""
    merger = Merger(2)
    for rank in (0, 0, 1, 1, 1):
        merger.add(rank, 1, b"same", 0.0)
    assert lines(merger, 0.0, everything=True) == [([0, 1], b"same"), ([0, 1], b"same"), ([1], b"same")]


@pytest.mark.slow
def test_lines_that_were_shown_are_forgotten() -> None:
    def print_lines(first: int) -> None:
        for number in range(first, first + 20_000):
            for rank in (0, 1):
                merger.add(rank, 1, b"%d" % number, 0.0)
            merger.take(0.0)

    merger = Merger(2)
    print_lines(0)
    tracemalloc.start()
    print_lines(20_000)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 100_000


def test_the_bar_of_all_ranks_names_the_slowest() -> None:
    """By its global rank."""
    pytest.importorskip("tqdm", reason="tqdm is not installed (extra: notebook)")
    found = [Loop(2, done, 5.0, 10, 1.0, "epoch") for done in (4, 6)]
    text = loop_line([*found, Loop(1, 10, 5.0, 10, 0.0, "before")], 2, rank_start=8)
    assert "epoch:   0%" in text
    assert "rank 10 is 6 behind" in text


class Place(Area):
    """Where lines are replaced."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.left: list[str] | None = None

    def show(self, text: str) -> str:
        self.shown.append(text)
        return ""

    def hide(self) -> str:
        return ""

    def close(self, lines: list[str]) -> str:
        self.left = lines
        return ""


def test_launches_at_the_same_time_do_not_draw_over_each_other() -> None:
    first, second = Place(), Place()
    displays = [place.lines(0.0) for place in (first, second)]
    for display in displays:
        display.draw(["line"], 1.0)
    assert (first.shown, second.shown) == (["line"], [])
    assert displays[1].due is None  # nor will it: the place is not handed over
    displays[0].close(["last"])
    displays[1].draw(["line"], 2.0)
    displays[1].close(["last"])
    assert (first.left, second.shown, second.left) == (["last"], [], None)


def test_where_all_output_was_cleared_who_draws_begins_anew() -> None:
    class Cell(Place):
        def forget(self) -> None:
            self.shown.clear()

    cell, clear = Cell(), (wire.line_of({"clear": True}) or b"").strip()
    drawing = cell.lines(0.0)
    caller.show(clear)
    drawing.draw(["line"], 1.0)
    caller.show(clear)
    assert cell.shown == []
    drawing.close([])


def test_a_launch_that_prints_makes_room_where_another_draws() -> None:
    class Terminal(Place):
        def hide(self) -> str:
            return f"hidden after {self.shown}"

    first, second = Terminal().lines(0.0), LiveLines()
    assert second.make_room() == ""
    first.draw(["line"], 1.0)
    assert second.make_room() == "hidden after ['line']"
    first.close([])
    assert second.make_room() == ""


def test_the_starting_line_makes_way_for_the_launch() -> None:
    place = Place()
    with StartingLine("train()", place) as line:
        line.show()
    assert place.left == []
    launch = place.lines(0.0)
    launch.draw(["train()  0:02  running"], 2.0)
    launch.close([])
    assert place.shown == ["train()  starting: importing torch", "train()  0:02  running"]


def test_the_starting_line_says_so_if_nothing_started() -> None:
    place = Place()
    line = StartingLine("train()", place)
    line.show()
    line.__exit__(KeyboardInterrupt)
    assert place.left == ["train()  failed"]


def test_a_fast_start_shows_nothing() -> None:
    place = Place()
    with StartingLine("train()", place):
        pass
    with StartingLine("train()", None) as line:
        line.show()
    assert (place.shown, place.left) == ([], None)


def test_a_place_that_breaks_is_free_again() -> None:
    class Broken(Place):
        def close(self, lines: list[str]) -> str:
            super().close(lines)
            raise BrokenPipeError

    display, place = Broken().lines(0.0), Place()
    display.draw(["line"], 1.0)
    display.close([])
    later = place.lines(0.0)
    later.draw(["line"], 2.0)
    later.close([])
    assert place.shown == ["line"]


class Pipes:
    """A relay with a pipe for each stream of each rank."""

    now = 0.0

    def __init__(self, plan: OutputPlan, size: int, rank_start: int = 0, board: Board | None = None) -> None:
        self.relay = Relay(plan, size, 0, lambda: self.now)
        self._writers: dict[tuple[int, int], int] = {}
        for rank in range(size):
            ends = {stream: os.pipe() for stream in plan.carried(rank)}
            self._writers |= {(rank, stream): writer for stream, (_, writer) in ends.items()}
            self.relay.adopt(rank_start + rank, rank, [reader for reader, _ in ends.values()], board)

    def write(self, rank: int, stream: int, data: bytes) -> None:
        os.write(self._writers[rank, stream], data)

    def file(self, rank: int, stream: int, board: Board) -> StampedFile:
        """As a rank's own."""
        return StampedFile(self._writers[rank, stream], functools.partial(board.stamp, rank, stream))

    def finish(self, *, held: bool = False) -> None:
        """``held``: a process that nobody could end still holds the ranks' ends."""
        if not held:
            self._close()
        self.relay.finish()
        self.relay.close()
        if held:
            self._close()

    def _close(self) -> None:
        for writer in self._writers.values():
            os.close(writer)


def prefix(ranks: Sequence[int]) -> str:
    return f"[{','.join(map(str, sorted(ranks)))}] "


def plan(size: int, policy: Policy, directory: Path | None = None) -> OutputPlan:
    policies = {(rank, stream): policy for rank in range(size) for stream in (1, 2)}
    return OutputPlan(policies, prefix, None if directory is None else str(directory))


@pytest.mark.parametrize("held", [False, True])
def test_the_relay_shows_and_keeps(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], held: bool) -> None:
    pipes = Pipes(plan(2, Policy(kept=True), tmp_path), 2)
    pipes.write(0, 1, b"hello\n")
    pipes.write(1, 1, b"hello\nraw \xff")
    pipes.write(1, 2, b"\r 50%\r100%\n")
    pipes.finish(held=held)
    shown = capfdbinary.readouterr()
    assert shown.out == b"[0,1] hello\n[1] raw \xff\n"
    assert shown.err == b"[1] 100%\n"
    assert (tmp_path / "attempt_0" / "1" / "stdout.log").read_bytes() == b"hello\nraw \xff"
    assert (tmp_path / "attempt_0" / "1" / "stderr.log").read_bytes() == b"\r 50%\r100%\n"


def test_a_pipe_whose_number_others_have_taken_is_not_read() -> None:
    pipes = Pipes(plan(1, Policy()), 1)
    number = min(pipes.relay._streams)
    reader, writer = os.pipe2(os.O_NONBLOCK)
    os.dup2(reader, number)
    os.write(writer, b"theirs")
    pipes.relay.carry([(number, select.EPOLLIN)])
    assert os.read(reader, 100) == b"theirs"
    pipes.finish()
    for fd in (reader, writer, number):  # which was left to them
        os.close(fd)


def test_lines_before_a_flood_are_shown_before_it(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    pipes = Pipes(plan(2, Policy()), 2)
    pipes.write(0, 1, b"before\n")
    pipes.relay.carry()
    assert capfdbinary.readouterr().out == b""  # it waits for the other rank
    pipes.write(0, 1, b"x" * 40_000 + b"\n")
    pipes.relay.carry()
    assert capfdbinary.readouterr().out == b"[0] before\n[0] " + b"x" * 40_000 + b"\n"
    pipes.finish()


def remembering(size: int, **policy: bool) -> OutputPlan:
    return dataclasses.replace(plan(size, Policy(**policy)), remember=True)


@pytest.mark.slow
@pytest.mark.usefixtures("capfdbinary")
@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("size", [1, 2, 64])
def test_the_end_of_what_a_rank_prints_is_remembered(size: int, shown: bool) -> None:
    """At most 64 KiB of a rank and 1 MiB of a launch, from the beginning of a line on."""
    pipes, limit = Pipes(remembering(size, shown=shown), size), 2**20 // max(size, 16)
    for number in range(0, 40_000, 100):
        pipes.write(0, 1 + number // 100 % 2, b"".join(b"line %06d\n" % (number + more) for more in range(100)))
        pipes.relay.carry()
    pipes.write(0, 1, b"the end")
    tails = pipes.relay.output._tails
    assert tails is not None
    assert sum(map(len, tails._tails.values())) <= 2 * limit
    pipes.finish()
    count = (limit - len(b"the end\n")) // len(b"line 000000\n")
    wanted = [b"line %06d" % number for number in range(40_000 - count, 40_000)]
    assert tails.of_ranks() == {0: b"\n".join([*wanted, b"the end\n"])}


def test_remembered_output_begins_with_a_line_where_it_was_just_cut() -> None:
    tails = Tails(1)
    tails.add(0, [b"line %06d" % number for number in range(20_000)])
    count = 2**16 // len(b"line 000000\n")
    wanted = b"".join(b"line %06d\n" % number for number in range(20_000 - count, 20_000))
    assert tails.of_ranks() == {0: wanted}


def test_a_bar_of_a_rank_that_is_not_shown_is_not_drawn() -> None:
    place, bar = Place(), b"\r 50%"
    pipes = Pipes(dataclasses.replace(remembering(2), area=place), 2)
    hidden = Pipes(dataclasses.replace(remembering(2, shown=False), area=place), 2)
    for pair in (hidden, pipes):
        pair.write(1, 2, bar)
        pair.now = pair.relay.output.due() or 0.0
        pair.relay.carry()
        pair.finish()
    assert place.shown == ["", "[1]  50%"]


def test_an_output_that_draws_is_not_reused() -> None:
    drawing = dataclasses.replace(remembering(1), area=Place())
    for first, second in itertools.product([drawing, remembering(1)], repeat=2):
        pipes = Pipes(first, 1)
        assert pipes.relay.output.serve(second) == (drawing not in (first, second))
        pipes.finish()


@pytest.mark.usefixtures("capfdbinary")
def test_the_end_of_a_line_that_is_longer_than_what_is_remembered() -> None:
    pipes = Pipes(remembering(1), 1)
    for _ in range(5):
        pipes.write(0, 1, b"x" * 40_000)
        pipes.relay.carry()
    pipes.finish()
    assert pipes.relay.output.tails() == {0: b"x" * (2**16 - 1) + b"\n"}


@pytest.mark.parametrize(("by_local_rank", "names"), [(False, ["2", "3"]), (True, ["0", "1"])])
def test_the_names_of_files_on_the_second_machine(tmp_path: Path, by_local_rank: bool, names: list[str]) -> None:
    """Decorated functions go by global rank, commands by local rank, as torchrun's."""
    kept = plan(2, Policy(shown=False, kept=True), tmp_path)
    pipes = Pipes(dataclasses.replace(kept, by_local_rank=by_local_rank), 2, rank_start=2)
    for local_rank in range(0 if by_local_rank else 2):  # a command's are there before
        pipes.write(local_rank, 1, b"a line\n")
    pipes.finish()
    assert sorted(path.name for path in (tmp_path / "attempt_0").iterdir()) == names


def test_a_line_that_is_overdue_is_due_now(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """A negative time would have a poll wait for ever."""
    pipes = Pipes(plan(2, Policy()), 2)
    assert pipes.relay.timeout() is None
    pipes.write(0, 1, b"line\n")
    pipes.relay.carry()
    assert pipes.relay.timeout() == WINDOW
    pipes.now = WINDOW + 5.0
    assert pipes.relay.timeout() == 0.0
    pipes.relay.carry()
    assert capfdbinary.readouterr().out == b"[0] line\n"
    assert pipes.relay.timeout() is None
    pipes.finish()


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create(2)
    yield made
    made.close()


def test_lines_come_in_the_order_of_their_writing(board: Board, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Although all are read at once: ranks print, meet, and print. A text of several lines stays in one piece."""
    pipes = Pipes(plan(2, Policy()), 2, board=board)
    files = [pipes.file(rank, 1, board) for rank in (0, 1)]
    for step in ("a", "b"):
        files[1].write(f"{step} of 1\nmore of 1\n".encode())
        files[0].write(f"{step} of 0\n".encode())
    pipes.relay.carry()
    pipes.finish()
    shown = capfdbinary.readouterr().out.decode().splitlines()
    assert shown == ["[1] a of 1", "[1] more of 1", "[0] a of 0", "[1] b of 1", "[1] more of 1", "[0] b of 0"]


BAR = b"\r 50%\r100%\n"  # it is held for a moment, since a bar below it may return to it


def into(shown: list[bytes], size: int) -> OutputPlan:
    return dataclasses.replace(plan(size, Policy()), merge=size > 1, sink=lambda _, data: shown.append(data))


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("end", [b"end", b"x" * 40_000], ids=["line", "flood"])
def test_a_bar_that_has_ended_is_shown_before_what_its_rank_printed_later(
    board: Board, size: int, end: bytes, at_once: bool
) -> None:
    shown: list[bytes] = []
    pipes = Pipes(into(shown, size), size, board=board)
    out, err = (pipes.file(0, stream, board) for stream in (1, 2))
    for _ in range(2):
        err.write(BAR)
        if not at_once:
            pipes.relay.carry()
        out.write(end + b"\n")
        pipes.relay.carry()
    err.write(BAR)
    pipes.relay.carry()
    out.write(b"last\n")
    pipes.finish()
    assert b"".join(shown).splitlines() == [b"[0] 100%", b"[0] " + end] * 2 + [b"[0] 100%", b"[0] last"]


def test_a_line_moves_behind_a_bar_to_be_shown_once(board: Board) -> None:
    shown: list[bytes] = []
    pipes = Pipes(into(shown, 2), 2, board=board)
    for rank, stream, data in ((1, 1, b"end\n"), (0, 2, BAR), (0, 1, b"end\n")):
        pipes.file(rank, stream, board).write(data)
        pipes.relay.carry()
    pipes.finish()
    assert b"".join(shown).splitlines() == [b"[0] 100%", b"[0,1] end"]


def test_the_order_over_both_streams_of_one_rank(board: Board) -> None:
    """Nothing is compared there, and one stream is read before the other."""
    shown: list[bytes] = []
    pipes = Pipes(into(shown, 1), 1, board=board)
    files = [pipes.file(0, stream, board) for stream in (1, 2)]
    for number in range(6):
        files[number % 3 % 2].write(b"%d\n" % number)
    pipes.relay.carry()
    pipes.finish()
    assert b"".join(shown).splitlines() == [b"[0] %d" % number for number in range(6)]


def test_writes_of_others_do_not_upset_the_order(board: Board) -> None:
    """C code and other processes note no times; after them, what is noted counts again."""
    times = WriteTimes(board, 1, 2)
    assert times.cut(b"from C\n", 5.0) == [(5.0, b"from C\n")]
    board.stamp(1, 2, 0, 4)
    board.stamp(1, 2, 4, 8)
    (_, first), (_, second) = board_times = [(at, start) for start, _, at in board.stamps(1, 2)][::-1]
    assert (first, second) == (0, 4)
    expected = [(board_times[0][0], b"one\n"), (board_times[1][0], b"two\n")]
    assert times.cut(b"one\ntwo\n", 5.0) == expected
    assert times.cut(b"from C\n", 5.0) == [(board_times[1][0], b"from C\n")]
    board.stamp(1, 2, 8, 12)
    board.stamp(1, 2, 12, 16)  # not read yet
    latest = [at for _, _, at in board.stamps(1, 2)]
    assert times.cut(b"new\n", 5.0) == [(latest[1], b"new\n")]
    assert times.cut(b"las", 5.0) == [(latest[0], b"las")]
    assert times.cut(b"t", 5.0) == [(latest[0], b"t")]


def test_more_writes_than_are_noted(board: Board) -> None:
    times = WriteTimes(board, 0, 1)
    for number in range(10_000):
        board.stamp(0, 1, 2 * number, 2 * number + 2)
    noted = list(board.stamps(0, 1))
    parts = times.cut(b"x\n" * 10_000, 5.0)
    assert b"".join(part for _, part in parts) == b"x\n" * 10_000
    assert [at for at, _ in parts] == [at for _, _, at in noted[::-1]]
    assert len(noted) > 100


def test_a_long_description_keeps_to_its_place(board: Board) -> None:
    board.stamp(0, 1, 0, 5)
    board.begin_loop(0, 10, "weights " * 1000)
    assert board.loop(0).description.startswith("weights weights")
    assert [(start, end) for start, end, _ in board.stamps(0, 1)] == [(0, 5)]
    assert board.loop(1).number == 0


def test_a_reading_was_there_at_one_moment(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """While the relay looks how much waits, rank 0 prints after it was looked at, and then rank 1, before it was."""
    pipes = Pipes(dataclasses.replace(plan(2, Policy()), merge=False), 2)
    looks: list[int] = []
    size = relay._size

    def looked(fd: int) -> int:
        looks.append(fd)
        if len(looks) == 2:
            pipes.write(0, 1, b"first\n")
            pipes.write(1, 1, b"second\n")
        return size(fd)

    monkeypatch.setattr(relay, "_size", looked)
    pipes.write(0, 1, b"begin\n")
    pipes.relay.carry()
    pipes.relay.carry()
    assert capfdbinary.readouterr().out.splitlines() == [b"[0] begin", b"[0] first", b"[1] second"]
    pipes.finish()


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
