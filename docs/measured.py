"""A Sphinx directive that shows figures of ``python -m benchmarks --json``: ``.. measured:: CASE ...``.

The figures are in ``figures.json``. Without a case it says in a sentence when, on what and by which command they were
made.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

PEERS = {  # as the README names them
    "torchrun": "torchrun",
    "torch.multiprocessing.spawn": "mp.spawn",
    "torchrunx": "torchrunx",
    "accelerate notebook_launcher": "accelerate",
}
SUMMARY = (  # case, which of our rows, in words
    ("warm call after a pause, 2 ranks, peers", "mlaunch", "a later call, 2 ranks, after a pause"),
    ("the command, 8 ranks", "mlaunch run", "a script of 8 ranks, by mlaunch run"),
    ("PSS of 8 idle ranks", "mlaunch run", "memory of 8 idle ranks of a script"),
)
FIGURES = Path(__file__).with_name("figures.json")


class Measured(SphinxDirective):
    """Takes names of benchmarks, or none."""

    optional_arguments = 20

    def run(self) -> list[nodes.Node]:
        """Returns a table, or the sentence."""
        self.env.note_dependency(str(FIGURES))
        figures = json.loads(FIGURES.read_text(encoding="utf-8"))
        rows = [row for name in self.arguments for row in figures["cases"][name]]
        lines = table(rows) if self.arguments else [sentence(figures)]
        parent = nodes.Element()
        self.state.nested_parse(StringList(lines, source=str(FIGURES)), 0, parent)
        return parent.children


def sentence(figures: dict[str, Any]) -> str:
    """Says when, on what and by which command figures were made."""
    devices = f"{figures['accelerators']} accelerators" if figures["accelerators"] else "no GPU"
    return (
        f"These figures were measured on {figures['date']} by ``{figures['command']}``, with mlaunch "
        f"{figures['mlaunch']}, Python {figures['python']} and torch {figures['torch']}, on a virtual machine with "
        f"{figures['cpus']} CPUs, {figures['memory_gib']} GiB and {devices}."
    )


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the lines of a list-table."""
    lines = [".. list-table::", "   :header-rows: 1", "", *_line("Case", "Who", "Median", "Ratio", "Aim")]
    for row in rows:
        ratio = f"{row['ratio']:.3g} of {row['reference']}" if row["ratio"] is not None else ""
        lines += _line(row["case"], row["name"], amount(row), ratio, f"{row['bound']}{', missed' * _missed(row)}")
    return lines


def _missed(row: dict[str, Any]) -> bool:
    """Tells whether a bound on the ratio, or on milliseconds, is not met."""
    found = re.fullmatch(r"(<=|<|>=) ([\d.]+)( ms)?", row["bound"])
    value = row["median"] and row["median"] * 1000 if found and found[3] else row["ratio"]
    if found is None or value is None:
        return False
    return value < float(found[2]) if found[1] == ">=" else value > float(found[2])


def summary(figures: dict[str, Any]) -> list[str]:
    """Returns the lines of the README's table: what mlaunch takes, and how many times that the others take."""
    cases = [row for rows in figures["cases"].values() for row in rows]
    rows = [("The same work", "mlaunch", "The others")]
    for case, ours, words in SUMMARY:
        mine = next(row for row in cases if (row["case"], row["name"]) == (case, ours))
        others = [row for row in cases if row["case"] == case and row["name"] in PEERS and row["median"] is not None]
        ratios = [f"{PEERS[row['name']]} {_rounded(row['median'] / mine['median'])}" for row in others]
        rows.append((words, amount(mine), ", ".join(ratios)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    rule = "  ".join("=" * width for width in widths)
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [rule, lines[0], rule, *lines[1:], rule]


def _rounded(ratio: float) -> str:
    return f"{ratio:.{0 if ratio >= 10 else 1}f}\N{MULTIPLICATION SIGN}"


def amount(row: dict[str, Any]) -> str:
    """Returns the median with its unit."""
    if row["median"] is None:
        return "did not run"
    if row["unit"] != "s":
        return f"{row['median']:,.{0 if row['median'] >= 100 else 1}f} {row['unit']}".strip()
    return f"{row['median'] * 1000:.3g} ms" if row["median"] < 1 else f"{row['median']:.3g} s"


def _line(*cells: str) -> list[str]:
    return [f"   {'  ' if number else '* '}- {cell}".rstrip() for number, cell in enumerate(cells)]


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    app.add_directive("measured", Measured)
    return {"parallel_read_safe": True}
