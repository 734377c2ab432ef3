"""A launch report as a picture: SVG without any library, PNG by matplotlib, and a trace for Perfetto."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from html import escape
from typing import Any

from mlaunch.base.text import in_seconds
from mlaunch.caller.report.launch_report import PHASES, LaunchReport, RankReport

# Okabe and Ito's, which colour-blind people can tell apart.
COLOURS = {
    "import": "#999999", "start": "#56B4E9", "rendezvous": "#E69F00", "receive": "#F0E442", "run": "#009E73",
    "send": "#0072B2", "wait": "#CCCCCC", "stop": "#CC79A7",
}  # fmt: skip
_WIDTH, _LEFT, _RIGHT, _TOP, _BAR, _GAP = 760, 70, 20, 34, 18, 6  # pixels
_SHOWN = 64  # ranks at most
_TICKS = 6


def svg(report: LaunchReport) -> str:
    ranks = report.ranks[:_SHOWN]
    height = _TOP + len(ranks) * (_BAR + _GAP) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12" fill="currentColor" role="img">',
        f"<title>{escape(report.title)}</title>",
        *_legend(report),
        *_axis(report, height - 30),
    ]
    for row, rank in enumerate(ranks):
        parts += _bars(rank, _TOP + row * (_BAR + _GAP), _scale(report))
    if len(report.ranks) > _SHOWN:
        parts.append(f'<text x="{_LEFT}" y="{height - 2}">and {len(report.ranks) - _SHOWN} ranks more</text>')
    return "\n".join([*parts, "</svg>"])


def _scale(report: LaunchReport) -> float:
    """Return the pixels per second."""
    return (_WIDTH - _LEFT - _RIGHT) / max(report.seconds, 1e-9)


def _legend(report: LaunchReport) -> Iterator[str]:
    x = _LEFT
    for phase in PHASES:
        if any(rank.seconds(phase) is not None for rank in report.ranks):
            yield f'<rect x="{x}" y="8" width="11" height="11" fill="{COLOURS[phase]}"/>'
            yield f'<text x="{x + 15}" y="18">{phase}</text>'
            x += 34 + 7 * len(phase)


def _axis(report: LaunchReport, y: int) -> Iterator[str]:
    step = _step(report.seconds)
    for tick in range(math.floor(report.seconds / step + 1e-9) + 1):
        x = _LEFT + tick * step * _scale(report)
        yield f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{y}" stroke="currentColor" stroke-opacity="0.2"/>'
        yield f'<text x="{x:.1f}" y="{y + 14}" text-anchor="middle">{tick * step:g} s</text>'


def _step(seconds: float) -> float:
    """Return 1, 2 or 5 times a power of ten, for about six ticks."""
    rough = max(seconds, 1e-9) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)


def _bars(rank: RankReport, y: int, scale: float) -> Iterator[str]:
    yield f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">rank {rank.rank}</text>'
    for span in rank.spans:
        x, width = _LEFT + span.start * scale, max((span.end - span.start) * scale, 0.5)
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{COLOURS[span.phase]}">'
            f"<title>rank {rank.rank}, {span.phase}: {in_seconds(span.end - span.start)}</title></rect>"
        )
    if rank.end != "returned":
        x = _LEFT + max((span.end for span in rank.spans), default=0.0) * scale
        yield f'<text x="{x - 4:.1f}" y="{y + 13}" text-anchor="end" fill="#D55E00" font-weight="bold">&#x2715;</text>'


def html(report: LaunchReport) -> str:
    head, *rows = report.rows()
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div><p><b>{escape(report.title)}</b></p>{svg(report)}{table}</div>"


def write_trace(report: LaunchReport, path: str | os.PathLike[str]) -> None:
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": f"{report.name} on {report.host}"}}
    ]
    for rank in report.ranks:
        named = {"name": f"rank {rank.rank} (pid {rank.pid}, {rank.device})"}
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank.rank, "args": named})
        for span in rank.spans:
            start, length = round(span.start * 1e6, 3), round((span.end - span.start) * 1e6, 3)
            events.append({"name": span.phase, "ph": "X", "pid": 0, "tid": rank.rank, "ts": start, "dur": length,
                           "args": {"end": rank.end}})  # fmt: skip
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def save_png(report: LaunchReport, path: str | os.PathLike[str]) -> None:
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("save_png needs matplotlib: pip install mlaunch[notebook]; to_svg() needs nothing") from error
    figure = Figure(figsize=(9, 1.2 + 0.3 * len(report.ranks)), layout="constrained")
    axes = figure.subplots()
    for rank in report.ranks:
        bars = [(span.start, span.end - span.start) for span in rank.spans]
        axes.broken_barh(bars, (rank.rank - 0.4, 0.8), facecolors=[COLOURS[span.phase] for span in rank.spans])
    used = [phase for phase in PHASES if any(rank.seconds(phase) is not None for rank in report.ranks)]
    axes.legend(handles=[Patch(color=COLOURS[phase], label=phase) for phase in used], ncols=len(used),
                loc="lower left", bbox_to_anchor=(0, 1), frameon=False)  # fmt: skip
    axes.set_yticks([rank.rank for rank in report.ranks], [f"rank {rank.rank}" for rank in report.ranks])
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds since the call of {report.name}")
    figure.savefig(path, dpi=120, format="png")
