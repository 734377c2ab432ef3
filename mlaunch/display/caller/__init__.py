"""Output in the calling process beyond plain lines: lines that change, and what ranks display in a notebook."""

from __future__ import annotations

from typing import Any

from mlaunch.caller.output.console import LiveLines
from mlaunch.caller.report import notebook
from mlaunch.display import wire
from mlaunch.display.caller.areas import Notebook as Notebook
from mlaunch.display.caller.areas import Terminal as Terminal
from mlaunch.display.caller.areas import area as area
from mlaunch.display.caller.areas import is_piped as is_piped
from mlaunch.display.caller.launch_lines import status_lines as status_lines
from mlaunch.display.wire import STREAM as STREAM
from mlaunch.display.wire import LineCutter as LineCutter
from mlaunch.display.wire import line_of as line_of

SECTIONS = {"display": True}  # with these, ranks make their part


def show(line: bytes) -> str:
    """Show a display of a rank in the running cell; return the text to print in its place, as ``publish`` does."""
    instead = publish(line)
    if clears(line) and LiveLines.holder is not None:
        LiveLines.holder.forget()
    return instead


def clears(line: bytes) -> bool:
    """True if the rank clears the cell's output."""
    found = wire.read(line)
    return found is not None and "clear" in found[1]


def publish(line: bytes, publisher: Any = None) -> str:
    """Show a display of a rank; return the text to print in its place, if the notebook does not take it.

    ``publisher``: None for the running cell's.
    """
    found = wire.read(line)
    if found is None:  # the rank was interrupted as it wrote
        return ""
    content: dict[str, Any] = found[1]
    try:
        publisher = notebook.shell().display_pub if publisher is None else publisher
        if "clear" in content:
            publisher.clear_output(wait=bool(content["clear"]))
        else:
            publisher.publish(**content)
    except Exception:  # a frontend's publisher may raise anything
        data = content.get("data")
        return f"{data.get('text/plain', '')}\n" if isinstance(data, dict) else ""
    return ""
