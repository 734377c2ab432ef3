"""Says in words what was compared, and writes it down for the documentation's tables and charts."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Row
from mlaunch import __version__

_QUANTITIES = {"s": "time", "MiB": "memory"}


def words(rows: Sequence[Row]) -> list[str]:
    """Returns a sentence for each row that has a ratio, and one for each peer that did not run."""
    return [sentence for row in rows if (sentence := _sentence(row))]


def _sentence(row: Row) -> str:
    if math.isnan(row.median):
        return f"{row.case}: {row.name} did not run here, so it was not measured."
    if row.ratio is None or math.isnan(row.ratio):
        return ""
    aim = f" (aim: {row.bound})" if row.bound else ""
    quantity = _QUANTITIES.get(row.unit, row.unit)
    return f"{row.case}: {row.name} takes {row.ratio:.3g} times the {quantity} of {row.reference}{aim}."


def write(path: Path, results: Mapping[str, Sequence[Row]], rounds: int) -> None:
    """Writes all rows as JSON, with what they were measured on and by which command. What is no number is null."""
    command = f"python -m benchmarks --rounds {rounds} {' '.join(results)}"
    found: dict[str, Any] = {"command": command, "rounds": rounds, **_surroundings()}
    found["cases"] = {name: [_plain(row) for row in rows] for name, rows in results.items()}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _plain(row: Row) -> dict[str, Any]:
    fields = dataclasses.asdict(row)
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in fields.items()}


def _surroundings() -> dict[str, Any]:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "mlaunch": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 1024**3),
        "accelerators": torch.accelerator.device_count() if torch.accelerator.is_available() else 0,
        "load_before": round(os.getloadavg()[0], 2),
    }
