"""Commands in the log of a job, by which GitHub Actions shows a failure beside a line of code.

A command begins a line, on either stream. Its text is escaped as GitHub documents it ("Workflow commands").
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from mlaunch.base.text import both_ends, first_bytes, without_escapes

_LONGEST_TITLE, _LONGEST = 200, 4000  # bytes; the whole report is in the log
_ESCAPED = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_ESCAPED_IN_PROPERTIES = {**_ESCAPED, ":": "%3A", ",": "%2C"}


def is_asked() -> bool:
    """True if this process is part of a job of GitHub's."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def error_command(title: str, message: str, places: Iterable[tuple[str, int]]) -> str:
    """Return the command that shows an error beside the first of these places that is in the checkout.

    Args:
        title: The heading, in bold type; it is not in the log.
        message: One or more lines.
        places: Files and lines, the innermost call first.
    """
    shown = {**_in_checkout(places), "title": first_bytes(without_escapes(title), _LONGEST_TITLE)}
    properties = ",".join(f"{name}={_escaped(text, _ESCAPED_IN_PROPERTIES)}" for name, text in shown.items())
    return f"::error {properties}::{_escaped(both_ends(without_escapes(message), _LONGEST), _ESCAPED)}"


def of_launch(failure: Mapping[str, Any]) -> str:
    """Return the command for a launch. ``failure``: as ``LaunchError.as_dict`` returns it."""
    kind = failure["exception"]["type"] if failure["exception"] else failure["kind"].replace("_", " ")
    rank = "" if failure["rank"] is None else f"rank {failure['rank']} of "
    # Without the traceback, which is above in the log.
    cause, _, rest = failure["text"].partition("\n\n")
    others = textwrap.dedent(rest.partition("meanwhile:\n")[2])
    title = f"{rank}{failure['function'] or 'mlaunch'}: {kind}"
    return error_command(title, "\n".join(filter(None, (cause, others))), places_of(failure["frames"]))


def places_of(frames: Iterable[Mapping[str, Any]] | None) -> list[tuple[str, int]]:
    """Return the places of a failure's frames in the user's own files."""
    return [(frame["file"], frame["line"]) for frame in frames or () if not frame["library"]]


def _in_checkout(places: Iterable[tuple[str, int]]) -> dict[str, str]:
    root = os.path.realpath(os.environ.get("GITHUB_WORKSPACE") or os.curdir)
    for file, line in places:
        path = os.path.relpath(os.path.realpath(file), root)
        if not path.startswith(os.pardir) and os.path.isfile(file):
            return {"file": path, "line": str(line)}
    return {}


def _escaped(text: str, escapes: Mapping[str, str]) -> str:
    return "".join(escapes.get(letter, letter) for letter in text)
