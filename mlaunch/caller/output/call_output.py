"""The output of one call's ranks, on its way to files and to people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlaunch.caller.output.console import Console, LiveLines, harmless
from mlaunch.caller.output.lines import WINDOW, LineSplitter, Merger, Tails, WriteTimes
from mlaunch.caller.output.output_plan import STREAMS, LaunchNumber, OutputPlan, Policy
from mlaunch.protocol.board import Board
from mlaunch.protocol.launch_files import LogFile

# Bytes at once. Lines of a rank that prints so much are not compared with the others', who would wait for it.
_FLOOD = 32768


@dataclass
class RankStream:
    """One stream of one rank during one call."""

    rank: int
    local_rank: int
    number: int  # 1, 2, or the stream of what it displays (``OutputPlan.rich``)
    policy: Policy
    file: LogFile | None
    times: WriteTimes
    splitter: LineSplitter = field(default_factory=LineSplitter)
    displays: Any = None  # cuts a stream of displays
    held: float | None = None  # the time since which the splitter holds a line
    held_written: float = 0.0  # the time at which that line was written


@dataclass
class WrittenLines:
    """Lines of one write. ``flood``: they are not compared with those of other ranks."""

    at: float
    stream: RankStream
    lines: Sequence[bytes]
    flood: bool = False


class CallOutput:
    """The output of a call: prefixed, merged, shown. ``size``: ranks of this machine; ``clock``: monotonic seconds.

    Its errors do not reach the supervising code that calls it: after one, output is shown as it comes.
    """

    def __init__(self, plan: OutputPlan, size: int, attempt: int, clock: Callable[[], float]) -> None:
        self.plan = plan
        self._attempt = attempt
        self._clock = clock
        self.console = Console()
        self._merger = Merger(size) if plan.merge and (size > 1 or plan.rich is not None) else None
        self._tails = Tails(size) if plan.remember else None
        self._live = LiveLines() if plan.area is None else plan.area.lines(clock())
        self._number = LaunchNumber()
        self._streams: list[RankStream] = []
        self._fresh: list[WrittenLines] = []  # taken, and not shown yet
        self.status: Callable[[], list[str]] = list  # the lines above the bars
        self._like: OutputPlan | None = None  # another plan for which this output can serve
        self._touched = False  # True: something has come, or was shown
        self._is_broken = False  # True: this class, or code that it uses, has failed

    def open_stream(self, rank: int, local_rank: int, number: int, board: Board | None = None) -> RankStream:
        """Begin a stream, with a file if the plan wants one. ``board``: on it, the rank notes its times of writing."""
        policy, file = self.plan.policies[local_rank, number], None
        if policy.kept and self.plan.directory is not None:
            name = local_rank if self.plan.by_local_rank else rank
            file = LogFile(self.plan.directory, self._attempt, name, number, self.say)
            if self.plan.by_local_rank:  # of a command: torchrun's users expect the files from the beginning
                file.write(b"")
        stream = RankStream(rank, local_rank, number, policy, file, WriteTimes(board, local_rank, number))
        if number not in STREAMS:
            stream.displays = self.plan.rich.LineCutter()
        self._streams.append(stream)
        return stream

    @property
    def untouched(self) -> bool:
        """True if nothing is left to show or to close."""
        return self.plan.plain and not self._touched

    def serve(self, plan: OutputPlan) -> bool:
        """Serve another call, if it wants the same and nothing has come: most calls print nothing."""
        reused = self.serves(plan)
        if reused:
            self._number.give_back()
            self._number, self.plan = LaunchNumber(), plan
        return reused

    def serves(self, plan: OutputPlan) -> bool:
        """True if it can serve another call."""
        if self._touched or (plan is not self._like and not plan.like(self.plan)):
            return False
        self._like = plan
        return True

    def take(self, stream: RankStream, data: bytes) -> None:
        """Take output of a rank."""
        self._touched = True
        if stream.file is not None:
            with harmless():
                stream.file.write(data)
        if not self._is_broken:
            with harmless():
                self._take(stream, data)
                return
            self._break()
        if stream.policy.shown and stream.number in STREAMS:
            self._print(stream.number, data)

    def _take(self, stream: RankStream, data: bytes) -> None:
        if not self._splits(stream):
            stream.times.skip(len(data))
            return
        now = self._clock()
        if stream.displays is not None:
            for at, line in stream.displays.feed(data, now):
                self._take_lines(stream, [line], at)
            return
        for at, part in stream.times.cut(data, now):
            self._split(stream, part, at, flood=len(data) >= _FLOOD)
        stream.held = now if stream.splitter.holding else None

    def end_stream(self, stream: RankStream) -> None:
        """Take the line that was never completed, and close the stream's file."""
        self._streams.remove(stream)
        with harmless():
            if self._touched and self._splits(stream) and not self._is_broken:
                self._release(stream)
                self._take_lines(stream, stream.splitter.end(), self._clock())
        with harmless():
            if stream.file is not None:
                stream.file.close()

    def tails(self) -> dict[int, bytes] | None:
        """Return the end of what each rank printed, shown or not; None if it is not kept."""
        if not self._touched:
            return None if self._tails is None else {}
        with harmless():
            return None if self._tails is None else self._tails.of_ranks()
        return None

    def due(self) -> float | None:
        """Return when a line has waited long enough, or changing lines are due; None if nothing is."""
        if not self._touched or self._is_broken:  # most calls: they print nothing
            return self._live.due
        held = [stream.held + WINDOW for stream in self._streams if stream.held is not None]
        steps = (self._merger.due if self._merger is not None else None, self._live.due, *held)
        return min((step for step in steps if step is not None), default=None)

    def show_due(self) -> None:
        """Show the lines and tables whose time has come."""
        now = self._clock()
        if self._touched:
            self.show_lines()
        if self._live.due is None or now < self._live.due:
            return
        if self.console.blocked is not None:
            self._live.postpone(now)
            return
        with harmless():
            lines = [*self._status(), *self._bars()]
            with self._live.lock:
                self.console.write(2, self._live.draw(lines, now).encode())
            return
        self._live.give_up()

    def show_lines(self) -> None:
        """Show the lines that have waited long enough. Called when all output up to some moment has been taken."""
        if not self._is_broken:
            with harmless():
                self._release_held(self._clock())
                self._show_waiting()
                return
            self._break()

    def finish(self) -> None:
        """Show what still waits, and the final state of the changing lines."""
        self._show_rest()
        with self._live.lock:
            status: list[str] = []
            with harmless():
                status = self._status() if self.plan.area is not None else []
            self.console.write(2, self._live.close(status).encode())

    def close(self) -> None:
        """Drop unshown output (after an error)."""
        if not self.untouched:
            with self._live.lock:
                self.console.write(2, self._live.close([]).encode())
        self.console.close()
        self._number.give_back()

    def stand_aside(self) -> None:
        """Give the launch number back: this is the output of no call now."""
        self._number.give_back()

    def write(self, text: str) -> None:
        """Show a text as it is, after all output that has come."""
        self._show_rest()
        self._print(1, text.encode(errors="backslashreplace"))

    def say(self, text: str) -> None:
        """Show a message of mlaunch."""
        self._print(2, f"mlaunch: {text}\n".encode(errors="backslashreplace"))

    def _status(self) -> list[str]:
        before = f"{self.plan.trial}: " if self.plan.trial else self._number.label()
        return [f"{before}{line}" for line in self.status()]

    def _bars(self) -> list[str]:
        return [
            f"{self._prefix([stream.rank])}{bar.decode(errors='replace')}"
            for stream in self._streams
            if stream.policy.shown
            for bar in stream.splitter.bars
        ]

    def _prefix(self, ranks: Sequence[int]) -> str:
        number = "" if self.plan.trial else self._number.label(self.plan.name)
        return number + self.plan.prefix(ranks)

    def _print(self, stream: int, data: bytes) -> None:
        self._touched = True
        if self.plan.sink is not None:
            with harmless():
                self.plan.sink(stream, data)
            return
        with self._live.lock:
            self.console.write(2, self._live.make_room().encode())
            self.console.write(stream, data)

    def _publish(self, stream: int, line: bytes) -> None:
        """Show a display of a rank, below what was printed before."""
        if self.plan.sink is not None:
            with harmless():
                self.plan.sink(stream, line)
            return
        instead = ""
        with self._live.lock, harmless():
            self.console.write(2, self._live.make_room().encode())
            instead = self.plan.rich.show(line)
        if instead:
            self._print(1, instead.encode(errors="backslashreplace"))

    def _split(self, stream: RankStream, part: bytes, at: float, *, flood: bool) -> None:
        """Take output that was written at one time; a line that was held keeps the time of its own writing."""
        held = stream.splitter.holding
        lines = stream.splitter.feed(part)
        self._take_lines(stream, lines[:held], stream.held_written, flood=flood)
        self._take_lines(stream, lines[held:], at, flood=flood)
        if stream.splitter.holding and (lines or not held):
            stream.held_written = at

    def _take_lines(self, stream: RankStream, lines: Sequence[bytes], at: float, *, flood: bool = False) -> None:
        if lines:
            self._fresh.append(WrittenLines(at, stream, lines, flood or self._merger is None))

    def _show_rest(self) -> None:
        with harmless():
            if not self._is_broken:
                self._show_waiting(everything=True)

    def _break(self) -> None:
        """Go on without what has failed: no longer cut, compare or keep lines."""
        self._is_broken = True
        self._live.give_up()

    def _splits(self, stream: RankStream) -> bool:
        return stream.policy.shown or self._tails is not None

    def _remember(self, stream: RankStream, lines: Sequence[bytes]) -> None:
        if self._tails is not None and stream.number in STREAMS:
            self._tails.add(stream.rank, lines)

    def _release_held(self, now: float) -> None:
        """Release lines that have waited long enough, or after which their rank has printed on another stream."""
        latest: dict[int, float] = {}
        for fresh in self._fresh:
            latest[fresh.stream.rank] = max(fresh.at, latest.get(fresh.stream.rank, 0.0))
        for stream in self._streams:
            later = latest.get(stream.rank, 0.0) > stream.held_written
            if stream.held is not None and (later or now >= stream.held + WINDOW):
                self._release(stream)

    def _release(self, stream: RankStream) -> None:
        if stream.splitter.holding:
            self._take_lines(stream, stream.splitter.release(), stream.held_written)
        stream.held = None

    def _show_waiting(self, *, everything: bool = False) -> None:
        fresh, self._fresh = self._fresh, []
        for found in sorted(fresh, key=lambda found: found.at):
            stream = found.stream
            self._remember(stream, found.lines)
            if stream.policy.shown and found.flood:
                self._show_merged(everything=True)
                prefix = self._prefix([stream.rank]).encode()
                self._print(stream.number, b"".join(prefix + line + b"\n" for line in found.lines))
            elif stream.policy.shown and self._merger is not None:
                for line in found.lines:
                    self._merger.add(stream.rank, stream.number, line, self._clock())
        self._show_merged(everything=everything)

    def _show_merged(self, *, everything: bool) -> None:
        for line in self._merger.take(self._clock(), everything=everything) if self._merger is not None else ():
            if line.stream in STREAMS:
                self._print(line.stream, self._prefix(line.ranks).encode() + line.text + b"\n")
            else:
                self._publish(line.stream, line.text)
