"""Alternating measurements, medians, and a table of ratios."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One contestant: the median of its measurements in ``unit``, against the reference's and the bound we set."""

    case: str
    name: str
    median: float
    unit: str
    reference: str = ""
    ratio: float | None = None
    bound: str = ""


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alternate(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median of each; in each round every contestant has its turn, so that a busy moment hits them alike.

    A peer that does not run on this machine is said so, and gets no number.
    """
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, measure in contestants.items():
            try:
                taken[name].append(measure())
            except Exception as error:
                if name.startswith("mlaunch"):
                    raise
                print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr)
                taken[name].append(math.nan)
    return {name: statistics.median(values) for name, values in taken.items()}


def compare(case: str, medians: Mapping[str, float], bounds: Mapping[str, tuple[str, str]], unit: str) -> list[Row]:
    """Rows for a table; ``bounds`` maps a contestant to its reference and the bound on the ratio to it."""
    rows = []
    for name, median in medians.items():
        reference, bound = bounds.get(name, ("", ""))
        ratio = median / medians[reference] if reference else None
        rows.append(Row(case, name, median, unit, reference, ratio, bound))
    return rows


def table(rows: list[Row]) -> str:
    lines = [f"{'case':<36} {'who':<28} {'median':>12}  {'ratio':>7}  {'to':<24} aim"]
    for row in rows:
        value = f"{row.median * 1000:.1f} ms" if row.unit == "s" else f"{row.median:.1f} {row.unit}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(f"{row.case:<36} {row.name:<28} {value:>12}  {ratio:>7}  {row.reference:<24} {row.bound}")
    return "\n".join(lines)
