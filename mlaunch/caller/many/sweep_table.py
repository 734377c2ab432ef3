"""What a sweep has come to, as rows and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from mlaunch.base.text import in_seconds, on_a_clock
from mlaunch.caller.many.trial import Trial
from mlaunch.caller.many.trial_arguments import in_words, varying_names

SHOWN = 60  # rows, where nobody has asked for all
_LONGEST = 80  # characters of an error or of values


def row(trial: Trial) -> dict[str, Any]:
    """Returns arguments, defaults included, and what came of it: under "state_", where an argument has that name."""
    taken = trial.arguments
    return {**taken, **{f"{name}_" if name in taken else name: value for name, value in _outcome(trial).items()}}


def _outcome(trial: Trial) -> dict[str, Any]:
    found: dict[str, Any] = {"state": trial.state}
    if trial.seconds is not None:
        found["seconds"] = trial.seconds
    if trial.latest is not None:
        found["reported"] = {"step": trial.latest.step, **trial.latest.values}
    if trial.state == "returned":
        found["values"] = trial.result()
    elif trial.state == "failed":
        error = trial.exception()
        found["error"] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return found


def text(trials: Sequence[Trial], most: int | None = None) -> str:
    """Draws the rows; of more than ``most`` the first, and says how many more there are."""
    lines = _cells(trials[:most])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    drawn = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([*drawn, *_more(trials, most)])


def html(trials: Sequence[Trial], most: int | None = None) -> str:
    """Draws the same for a notebook."""
    head, *lines = _cells(trials[:most])
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    below = "".join(f"<p>{escape(line)}</p>" for line in _more(trials, most))
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>{below}"


def in_one_line(name: str, trials: Sequence[Trial], seconds: float) -> str:
    """Says how far a sweep is: "train: 5 of 12 done, 1 failed, 4 running  0:35"."""
    counts = Counter(trial.state for trial in trials)
    others = "".join(
        f", {counts[state]} {state}" for state in ("failed", "cancelled", "starting", "running") if counts[state]
    )
    return f"{name}: {counts['returned']} of {len(trials)} done{others}  {on_a_clock(seconds)}"


def _more(trials: Sequence[Trial], most: int | None) -> list[str]:
    left = 0 if most is None else len(trials) - most
    return [f"and {left} more: table() has all"] if left > 0 else []


def _cells(trials: Sequence[Trial]) -> list[list[str]]:
    """Returns the names of the columns, and the lines: arguments that are not the same in all, then what came of it."""
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
