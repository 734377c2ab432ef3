"""Shows in a notebook what ranks display."""

from __future__ import annotations

from typing import Any

from mlaunch.caller.report import notebook
from mlaunch.protocol import rich_output


def is_shown_here() -> bool:
    """Tells whether this process is the kernel of a notebook."""
    return getattr(notebook.shell(), "kernel", None) is not None


def clears(line: bytes) -> bool:
    """Tells whether the line of a rank asks that the cell's output be cleared."""
    found = rich_output.read(line)
    return found is not None and "clear" in found[1]


def publish(line: bytes) -> str:
    """Shows what a rank has sent; returns what is to be printed instead, if the notebook takes none of it."""
    found = rich_output.read(line)
    if found is None:  # the rank was interrupted as it wrote
        return ""
    content: dict[str, Any] = found[1]
    try:
        publisher = notebook.shell().display_pub
        if "clear" in content:
            publisher.clear_output(wait=bool(content["clear"]))
        else:
            publisher.publish(**content)
    except Exception:  # there is no telling what a frontend's publisher raises at what a rank has made
        data = content.get("data")
        return f"{data.get('text/plain', '')}\n" if isinstance(data, dict) else ""
    return ""
