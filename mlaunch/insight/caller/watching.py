"""``mlaunch ps --watch`` and ``train.watch()``: a table of what ranks and devices do, drawn each second."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlaunch.base.text import columns, filled, in_bytes, in_two_units, shown
from mlaunch.caller.call_log import CallLog
from mlaunch.caller.output.console import Console, LiveLines
from mlaunch.caller.report import notebook
from mlaunch.caller.report.failure_text import in_words, users_place
from mlaunch.caller.running_launches import ask, facts_of, launches_of, place_of_rank, title_of
from mlaunch.core import load
from mlaunch.insight.wire import WATCH

if TYPE_CHECKING:
    from mlaunch.display.caller.areas import Area, DrawnLines

EVERY = 1.0  # seconds
_REDRAWN = 0.1  # seconds
_STILL = 10.0  # seconds without a turn of a loop, after which that is shown in place of its rate
_SLOW = 5  # or as many turns at its rate
_HEAD = ("rank", "device", "state", "where", "loop", "rate", "CPU", "memory", "on device", "device use")
_LEFT = 5  # columns of words; the others are numbers
_RUNNING = "running"

DeviceUsed = tuple[int, int, int | None]  # bytes in use, bytes in all, percent of the time that it works, if told
AskDevice = Callable[[str], DeviceUsed | None]  # by the name of a device of this machine; None: unknown


def watch_all(
    every: float, nothing: Callable[[], str], chosen: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
) -> None:
    """Show this user's running launches on the terminal until interrupted.

    ``nothing``: the text if none runs; ``chosen``: those of all that are shown.

    Raises:
        OSError: stdout is no terminal, or a program that may draw there reads stderr.
        ImportError: Without rich (extra: watch).
    """
    if not sys.stdout.isatty():
        raise OSError("ps --watch needs a terminal, and stdout is not one; a program can read mlaunch ps --json")
    drawing = load.room("display", "caller", "mlaunch ps --watch")
    if drawing.is_piped(2):
        raise OSError("ps --watch draws on the whole terminal, and so may the program that reads its stderr: send that "
                      "to a file (2>errors.txt)")  # fmt: skip
    place, table = _terminal(drawing, "mlaunch ps --watch"), _table()
    try:
        while True:
            launches = sorted(chosen(ask(WATCH)), key=lambda launch: float(launch["age"]))
            _write(place.show("\n".join(table.lines(launches) or [nothing()])))
            time.sleep(every)
    finally:
        _write(place.close([]))


def watch_calls(name: str, log: CallLog) -> None:
    """Show what each rank of the function's calls does, in other threads or submitted, until none runs.

    In a notebook this is a display of the running cell; on a terminal, lines below the output, in place of the calls'
    own. An interrupt ends it, not the calls.

    Raises:
        RuntimeError: There is neither notebook nor terminal.
        ImportError: On a terminal, without rich (extra: watch).
    """
    display, table = _place_for(f"{name}.watch()").lines(time.monotonic()), _table()
    lines: list[str] = []
    try:
        while launches := _launches(name, log):
            lines = table.lines([launch for launch in launches if launch]) or [f"{name}() has no ranks yet"]
            _show_for_a_while(display, lines, log)
        if not lines:
            _tell(f"mlaunch: no call of {name}() runs in this process\n")
    finally:
        state = "runs" if log.running else "has ended"
        with LiveLines.lock:
            above = [] if notebook.is_here() else [""]  # a terminal leaves the first line out
            _tell(display.close([*above, *lines, f"{name}() {state}"]) if lines else "")


def _launches(name: str, log: CallLog) -> list[dict[str, Any]]:
    """Return the answers of launches for the function's calls, {} for one that has not begun; [] after the last."""
    found = [launch for launch_id in launches_of(name) for launch in ask(WATCH, launch_id)]
    return found or [{}] * log.running


def _show_for_a_while(display: DrawnLines, lines: list[str], log: CallLog) -> None:
    """Draw the lines several times, since output takes their place."""
    until = time.monotonic() + EVERY
    while (now := time.monotonic()) < until:
        with LiveLines.lock:
            _tell(display.take_over() + display.draw(lines, now))
        if not log.running:  # only a sweep counts its launches
            time.sleep(_REDRAWN)
        elif log.wait_over(_REDRAWN):
            return


def _table() -> RankTable:
    return RankTable(DeviceUse().of, os.uname().nodename)


def _place_for(who: str) -> Area:
    drawing = load.room("display", "caller", who)
    if notebook.is_here():
        found: Area = drawing.Notebook()
        return found
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        raise RuntimeError(f"{who} needs a notebook, or a terminal as stderr; {who.removesuffix('watch()')}why() and "
                           f"mlaunch ps show it as text")  # fmt: skip
    if drawing.is_piped(1):
        raise RuntimeError(f"{who} draws on the terminal, and so may the program that reads stdout (| less): send that "
                           f"to a file, or ask {who.removesuffix('watch()')}why()")  # fmt: skip
    return _terminal(drawing, who)


def _terminal(drawing: Any, who: str) -> Area:
    try:
        found: Area = drawing.Terminal()
    except ImportError as error:
        raise ImportError(f"{who} draws on a terminal with rich, which is not installed: "
                          f"pip install 'mlaunch[watch]'") from error  # fmt: skip
    return found


def _tell(text: str) -> None:
    """Write to stderr, as calls do."""
    console = Console()
    console.write(2, text.encode())
    console.close()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


# The rows of the table, from what agents answer to ``watch``


@dataclass
class _Rank:
    """A rank at the previous drawing."""

    age: float  # of its launch, in seconds
    cpu: float
    loop: Mapping[str, Any]
    rate: float | None  # turns per second, when it last made any


@dataclass
class RankTable:
    """The table of ranks. It remembers the last one, for rates. ``host``: this machine, whose devices can be asked."""

    ask_device: AskDevice
    host: str
    _known: dict[tuple[str, int], _Rank] = field(default_factory=dict)

    def lines(self, launches: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return a title and a table for each launch."""
        before, self._known = self._known, {}
        blocks = [
            [title_of(launch), *(f"  {fact}" for fact in facts_of(launch)), *self._table(launch, before)]
            for launch in shown([*launches])
        ]
        return [line for block in blocks for line in ["", *block]][1:]

    def _table(self, launch: Mapping[str, Any], before: Mapping[tuple[str, int], _Rank]) -> list[str]:
        rows = [_HEAD, *(self._row(launch, rank, before) for rank in launch["ranks"])]
        used = [any(row[column] for row in rows[1:]) for column in range(len(_HEAD))]
        widths = [(column, max(columns(row[column]) for row in rows)) for column, told in enumerate(used) if told]
        return ["  " + "  ".join(_aligned(row[column], column, width) for column, width in widths).rstrip()
                for row in rows]  # fmt: skip

    def _row(
        self, launch: Mapping[str, Any], rank: Mapping[str, Any], before: Mapping[tuple[str, int], _Rank]
    ) -> tuple[str, ...]:
        key = (str(launch["id"]), int(rank["rank"]))
        was, loop, cpu = before.get(key), rank.get("loop") or {}, rank.get("cpu", 0.0)
        rate = _rate(loop, was)
        self._known[key] = _Rank(launch["age"], cpu, loop, rate)
        memory = rank.get("memory", 0)
        return (
            str(rank["rank"]),
            place_of_rank(rank),
            rank["state"],
            _where(rank),
            _turns(loop),
            _pace(loop, rate),
            _percent(cpu - was.cpu, launch["age"] - was.age) if was is not None else "",
            in_bytes(memory) if memory else "",
            *self._on_device(rank),
        )

    def _on_device(self, rank: Mapping[str, Any]) -> tuple[str, str]:
        found = self.ask_device(rank["device"]) if rank.get("host", self.host) == self.host else None
        if found is None:
            return "", ""
        used, size, percent = found
        return f"{in_bytes(used)} of {in_bytes(size)}", "" if percent is None else f"{percent}%"


def _aligned(cell: str, column: int, width: int) -> str:
    return filled(cell, width, left=0 < column <= _LEFT)


def _where(rank: Mapping[str, Any]) -> str:
    """Return the rank's place in the user's code; "" if it is elsewhere, or unknown."""
    frames = [tuple(frame) for frame in rank.get("frames", [])]
    users = users_place(frames) is not None
    return in_words(frames) if users and rank["state"].startswith(_RUNNING) else ""


def _turns(loop: Mapping[str, Any]) -> str:
    if not loop.get("number"):
        return ""
    before = f"{loop['description']}: " if loop["description"] else ""
    return f"{before}{loop['done']}" + (f"/{loop['total']}" if loop["total"] >= 0 else "")


def _rate(loop: Mapping[str, Any], was: _Rank | None) -> float | None:
    """Return the turns per second since the last drawing, or at the last turn; None before the first."""
    if not loop.get("number"):
        return None
    same = was is not None and was.loop.get("number") == loop["number"]
    done, seconds = (was.loop["done"], was.loop["seconds"]) if same and was is not None else (0, 0.0)
    if loop["done"] > done and loop["seconds"] > seconds:
        return float((loop["done"] - done) / (loop["seconds"] - seconds))
    return was.rate if same and was is not None else None


def _pace(loop: Mapping[str, Any], rate: float | None) -> str:
    """Return "12.5/s", "3.1 s each", or "none for 41 s"."""
    over = not loop.get("number") or loop["done"] == loop["total"]
    if not over and loop["still"] >= max(_STILL, 0.0 if not rate else _SLOW / rate):
        return f"none for {in_two_units(loop['still'])}"
    if over or not rate:
        return ""
    return f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each"


def _percent(used: float, seconds: float) -> str:
    return f"{100 * used / seconds:.0f}%" if seconds > 0 else ""


# Devices, by NVIDIA's library. It asks the driver, which may not answer: so neither a rank nor its agent loads it.

_NVIDIA = "cuda"


class DeviceUse:
    """The memory and use of devices of this machine, from NVIDIA's library. ``load`` imports its package."""

    def __init__(self, load: Callable[[str], Any] = importlib.import_module) -> None:
        self._load = load
        self._library: Any = None
        self._tried = False

    def of(self, device: str) -> tuple[int, int, int | None] | None:
        """Return used bytes, all bytes and percent of time in use (None: unknown) of a device such as "cuda:2".

        By the number that ``nvidia-smi`` shows, or by UUID, "cuda:GPU-...". None if unknown.
        """
        kind, _, name = device.partition(":")
        nvml = self._opened() if kind == _NVIDIA and name else None
        if nvml is None:
            return None
        try:
            by_number = name.isdigit()
            handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_number else nvml.nvmlDeviceGetHandleByUUID(name)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError:
            return None
        return int(memory.used), int(memory.total), _use_of(nvml, handle)

    def _opened(self) -> Any:
        """Return the library; None without it or without a driver."""
        if not self._tried:
            self._tried = True
            try:
                library = self._load("pynvml")
            except ImportError:
                return None
            try:
                library.nvmlInit()
                self._library = library
            except library.NVMLError:
                return None
        return self._library


def _use_of(nvml: Any, handle: object) -> int | None:
    """Return the percent of time in which a kernel ran; None if unknown, as for a MIG instance."""
    try:
        return int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except nvml.NVMLError:
        return None
