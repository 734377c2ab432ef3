"""What GitHub Actions shows of a failure beside a line of code: commands in the log of a job.

They begin a line, on either stream; what is in them is escaped as GitHub documents it ("Workflow commands").
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
    """Return the line that has GitHub show an error, beside the first of these places that is in the checkout.

    Args:
        title: What is shown in bold type, and not in the log.
        message: One or several lines.
        places: Files and lines, the innermost call first.
    """
    shown = {**_in_checkout(places), "title": first_bytes(without_escapes(title), _LONGEST_TITLE)}
    properties = ",".join(f"{name}={_escaped(text, _ESCAPED_IN_PROPERTIES)}" for name, text in shown.items())
    return f"::error {properties}::{_escaped(both_ends(without_escapes(message), _LONGEST), _ESCAPED)}"


def of_launch(failure: Mapping[str, Any]) -> str:
    """Return the same for a launch. ``failure``: as ``LaunchError.as_dict`` has it."""
    kind = failure["exception"]["type"] if failure["exception"] else failure["kind"].replace("_", " ")
    rank = "" if failure["rank"] is None else f"rank {failure['rank']} of "
    # Less the traceback, which stands above in the log.
    cause, _, rest = failure["text"].partition("\n\n")
    others = textwrap.dedent(rest.partition("meanwhile:\n")[2])
    title = f"{rank}{failure['function'] or 'mlaunch'}: {kind}"
    return error_command(title, "\n".join(filter(None, (cause, others))), places_of(failure["frames"]))


def places_of(frames: Iterable[Mapping[str, Any]] | None) -> list[tuple[str, int]]:
    """Return the places of a failure's frames that are in the user's own files."""
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
