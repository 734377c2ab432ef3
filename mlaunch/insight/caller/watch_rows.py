"""What ranks do from look to look, as the rows of a table. Pure functions on what agents tell (the word ``watch``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlaunch.base.text import columns, filled, in_bytes, in_two_units, shown
from mlaunch.caller.report.failure_text import in_words, users_place
from mlaunch.caller.running_launches import facts_of, place_of_rank, title_of

_STILL = 10.0  # seconds in which a loop makes no turn, after which that is told instead of its rate
_SLOW = 5  # turns that it may take as long as
_HEAD = ("rank", "device", "state", "where", "loop", "rate", "CPU", "memory", "on device", "device use")
_LEFT = 5  # columns of words; the others are numbers
_RUNNING = "running"

DeviceLook = tuple[int, int, int | None]  # bytes in use, bytes in all, percent of the time that it works, if told
LookAt = Callable[[str], DeviceLook | None]  # at a device of this machine, by its name; None: it does not tell


@dataclass
class _Rank:
    """A rank as it was seen the last time."""

    age: float  # of its launch, in seconds
    cpu: float
    loop: Mapping[str, Any]
    rate: float | None  # turns per second, when it last made any


@dataclass
class RankTable:
    """Draws one look after the other. ``host``: the name of this machine, whose devices can be looked at."""

    look_at: LookAt
    host: str
    _known: dict[tuple[str, int], _Rank] = field(default_factory=dict)

    def lines(self, launches: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns a title and a table for each launch."""
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
        found = self.look_at(rank["device"]) if rank.get("host", self.host) == self.host else None
        if found is None:
            return "", ""
        used, size, percent = found
        return f"{in_bytes(used)} of {in_bytes(size)}", "" if percent is None else f"{percent}%"


def _aligned(cell: str, column: int, width: int) -> str:
    return filled(cell, width, left=0 < column <= _LEFT)


def _where(rank: Mapping[str, Any]) -> str:
    """Says where it is in the user's code; "" if it is not there, or has not told."""
    frames = [tuple(frame) for frame in rank.get("frames", [])]
    users = users_place(frames) is not None
    return in_words(frames) if users and rank["state"].startswith(_RUNNING) else ""


def _turns(loop: Mapping[str, Any]) -> str:
    if not loop.get("number"):
        return ""
    before = f"{loop['description']}: " if loop["description"] else ""
    return f"{before}{loop['done']}" + (f"/{loop['total']}" if loop["total"] >= 0 else "")


def _rate(loop: Mapping[str, Any], was: _Rank | None) -> float | None:
    """Returns the turns per second since the last look, or when it last made any; None before the first."""
    if not loop.get("number"):
        return None
    same = was is not None and was.loop.get("number") == loop["number"]
    done, seconds = (was.loop["done"], was.loop["seconds"]) if same and was is not None else (0, 0.0)
    if loop["done"] > done and loop["seconds"] > seconds:
        return float((loop["done"] - done) / (loop["seconds"] - seconds))
    return was.rate if same and was is not None else None


def _pace(loop: Mapping[str, Any], rate: float | None) -> str:
    """Says "12.5/s", "3.1 s each", or that it makes none: "none for 41 s"."""
    over = not loop.get("number") or loop["done"] == loop["total"]
    if not over and loop["still"] >= max(_STILL, 0.0 if not rate else _SLOW / rate):
        return f"none for {in_two_units(loop['still'])}"
    if over or not rate:
        return ""
    return f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each"


def _percent(used: float, seconds: float) -> str:
    return f"{100 * used / seconds:.0f}%" if seconds > 0 else ""
