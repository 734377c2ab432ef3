"""What a rank displays, in the cell of the notebook that called."""

from __future__ import annotations

from typing import Any

from mlaunch.caller.output.live import LiveLines
from mlaunch.caller.report import notebook
from mlaunch.display import wire


def show(line: bytes) -> str:
    """Show what a rank has sent in the cell that runs; return what is to be printed instead, as ``publish`` does."""
    instead = publish(line)
    if clears(line) and LiveLines.holder is not None:
        LiveLines.holder.forget()
    return instead


def clears(line: bytes) -> bool:
    """True if the line of a rank asks that the cell's output be cleared."""
    found = wire.read(line)
    return found is not None and "clear" in found[1]


def publish(line: bytes, publisher: Any = None) -> str:
    """Show what a rank has sent; return what is to be printed instead, if the notebook takes none of it.

    ``publisher``: None for that of the cell that runs.
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
    except Exception:  # there is no telling what a frontend's publisher raises at what a rank has made
        data = content.get("data")
        return f"{data.get('text/plain', '')}\n" if isinstance(data, dict) else ""
    return ""
