"""The trials of a sweep as rows and as a table."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, cast

from mlaunch.base.text import in_seconds, on_a_clock
from mlaunch.sweeps.caller.trial import Trial
from mlaunch.sweeps.caller.trial_arguments import in_words, varying_names

_OVER = ("returned", "failed", "cancelled")
SHOWN = 60  # rows, unless somebody asks for all
_LONGEST = 80  # characters of an error or of values


def row(trial: Trial) -> dict[str, Any]:
    """Return a trial's arguments, defaults included, and its outcome: as "state_" if an argument is named "state".

    What was reported and what rank 0 returned have columns of their own, to compute with.
    """
    found, outcome = dict(trial.arguments), _outcome(trial)
    last = {name: outcome.pop(name) for name in ("values", "error") if name in outcome}
    reported = outcome.pop("reported", {})
    for columns in (outcome, reported, _of_rank0(last.get("values")), last):
        for name, value in columns.items():
            free = name
            while free in found:
                free += "_"
            found[free] = value
    return found


def _of_rank0(values: Sequence[Any] | None) -> dict[str, Any]:
    """Return what rank 0 has returned as ``value``, or as a column for each of its keys."""
    if not values:
        return {}
    named = isinstance(values[0], dict) and all(isinstance(name, str) for name in values[0])
    return {name: _number(value) for name, value in (values[0] if named else {"value": values[0]}).items()}


def _number(value: Any) -> Any:
    """Return the number in a tensor of no dimension; anything else as it is."""
    torch = sys.modules.get("torch")
    return value.item() if torch is not None and isinstance(value, torch.Tensor) and value.dim() == 0 else value


def _reason(error: BaseException) -> str:
    """Return in one line why a trial failed; if it hung, first who held it up."""
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    kept = [line for line in others if line != "meanwhile:"]
    if kept and "had not returned" in first:
        first = f"{kept[0]}; {first}"
    return f"{type(error).__name__}: {first}"


def _outcome(trial: Trial) -> dict[str, Any]:
    found: dict[str, Any] = {"state": trial.state}
    if trial.seconds is not None:
        found["seconds"] = trial.seconds
    if trial.latest is not None:
        found["reported"] = {"step": trial.latest.step, **trial.latest.values}
    if trial.state == "returned":
        found["values"] = trial.result()
    elif trial.state == "failed":
        found["error"] = _reason(cast("BaseException", trial.exception()))
    return found


def text(trials: Sequence[Trial], most: int | None = None) -> str:
    """Return the rows as text; if there are more than ``most``, the first ones and how many more there are."""
    lines = _cells(trials[:most])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    drawn = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([*drawn, *_more(trials, most)])


def html(trials: Sequence[Trial], most: int | None = None) -> str:
    """Return the same for a notebook."""
    head, *lines = _cells(trials[:most])
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    below = "".join(f"<p>{escape(line)}</p>" for line in _more(trials, most))
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>{below}"


def in_one_line(name: str, trials: Sequence[Trial], seconds: float) -> str:
    """Return how far a sweep is: "train: 6 of 12 done (1 of them failed), 4 running, 2 waiting  0:35"."""
    counts = Counter(trial.state for trial in trials)
    done = sum(counts[state] for state in _OVER)
    bad = ", ".join(f"{counts[state]} {state}" for state in _OVER[1:] if counts[state])
    of_them = f" ({bad.replace(' ', ' of them ', 1)})" if bad else ""
    others = "".join(f", {counts[state]} {state}" for state in ("starting", "running", "waiting") if counts[state])
    return f"{name}: {done} of {len(trials)} done{of_them}{others}  {on_a_clock(seconds)}"


def _more(trials: Sequence[Trial], most: int | None) -> list[str]:
    left = 0 if most is None else len(trials) - most
    return [f"and {left} more: table() has all"] if left > 0 else []


def _cells(trials: Sequence[Trial]) -> list[list[str]]:
    """Return the names of columns, then a line for each trial: arguments that differ between trials, and outcome."""
    given = [{name: in_words(value) for name, value in trial.given.items()} for trial in trials]
    found = [{name: _told(value) for name, value in _outcome(trial).items()} for trial in trials]
    arguments = varying_names(given)
    ours = [name for name in ("state", "seconds", "reported", "values", "error") if any(name in one for one in found)]
    lines = [
        [*(one.get(name, "") for name in arguments), *(other.get(name, "") for name in ours)]
        for one, other in zip(given, found, strict=True)
    ]
    return [[*arguments, *ours], *lines]


def _told(value: object) -> str:
    if isinstance(value, float):
        return in_seconds(value)
    parts: Iterable[str] = [str(value)]
    if isinstance(value, list):
        parts = map(_in_short, value)
    elif isinstance(value, dict):
        parts = (f"{name}={_in_short(part)}" for name, part in value.items())
    said = ", ".join(parts)
    return said if len(said) <= _LONGEST else f"{said[: _LONGEST - 3]}..."


def _in_short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else in_words(value)
