"""Draws the charts of docs/performance.rst from docs/figures.json, and prints the README's table. Needs matplotlib."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from measured import FIGURES, amount, sentence, summary

OURS, THEIRS = "#1a7f64", "#9aa3ad"
CHARTS = {
    "warm": ("warm call after a pause, 2 ranks, peers", "A warm call of 2 ranks"),
    "cold": ("the command, 8 ranks", "A script of 8 ranks, from start to end"),
}


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draws one bar for each contestant that ran, with its time beside it."""
    ran = [row for row in rows if row["median"] is not None][::-1]
    figure = Figure(figsize=(7, 0.45 * len(ran) + 0.7), layout="constrained")
    axes = figure.add_subplot()
    colors = [OURS if row["name"].startswith("mlaunch") else THEIRS for row in ran]
    bars = axes.barh([row["name"] for row in ran], [row["median"] for row in ran], color=colors)
    axes.bar_label(bars, [amount(row) for row in ran], padding=4, color="#7d858c")
    axes.set_title(title, loc="left", color="#7d858c", fontsize=11)
    axes.margins(x=0.15)
    axes.set_xticks([])
    axes.tick_params(colors="#7d858c", length=0)
    axes.spines[:].set_visible(False)
    figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> None:
    mpl.rcParams["svg.hashsalt"] = "mlaunch"  # the same figures give the same file
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    cases = [row for rows in figures["cases"].values() for row in rows]
    folder = FIGURES.parent / "charts"
    folder.mkdir(exist_ok=True)
    for name, (case, title) in CHARTS.items():
        draw([row for row in cases if row["case"] == case], title, folder / f"{name}.svg")
    print(*summary(figures), "", sentence(figures), sep="\n")


if __name__ == "__main__":
    main()
