"""The table that ``%ranks`` prints: each rank with its state, its memory and what cells have left there."""

from __future__ import annotations

from collections.abc import Sequence

from mlaunch.base.text import in_bytes, ranges
from mlaunch.cells.wire import NamesOfRank

_SHOWN = 12  # names
_NO_NAMES = "cells have left no names there"


def table(devices: Sequence[str], state: str, told: Sequence[NamesOfRank]) -> str:
    """Writes the table. ``told``: by rank; empty while the ranks are busy and cannot be asked."""
    if not told:
        return f"{_head(len(devices), devices, state)}\n(busy ranks cannot be asked for their memory and names)"
    rows = [("rank", "pid", "device", "memory", "on device")]
    for rank, here in enumerate(told):
        device = devices[rank] if rank < len(devices) else ""
        on_device = in_bytes(here.device_memory) if here.device_memory else "-"
        rows.append((str(rank), str(here.pid), device, in_bytes(here.memory), on_device))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([_head(len(told), devices, state), *lines, *_names(told)])


def _head(size: int, devices: Sequence[str], state: str) -> str:
    kinds = ", ".join(dict.fromkeys(device.partition(":")[0] for device in devices))
    return f"{size} rank{'s' if size > 1 else ''} on {kinds}, {state}"


def _names(told: Sequence[NamesOfRank]) -> list[str]:
    """Says what the ranks hold: what all have alike once, else by rank. The largest first."""
    having: dict[tuple[str, str, int], list[int]] = {}
    for rank, here in enumerate(told):
        for name, (kind, size) in here.names.items():
            having.setdefault((name, kind, size), []).append(rank)
    rows = sorted(having.items(), key=lambda found: (-found[0][2], found[0][0]))
    lines = []
    for (name, kind, size), ranks in rows[:_SHOWN]:
        where = "" if len(ranks) == len(told) else f"[{ranges(ranks, ',')}] "
        lines.append(f"{where}{name}: {kind}, {in_bytes(size)}")
    more = [f"and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    return [*lines, *more] or [_NO_NAMES]
