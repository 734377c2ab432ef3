"""Words for the user of a launch while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlaunch.base.text import in_bytes
from mlaunch.protocol.messages.launch_messages import NamesLeft
from mlaunch.protocol.messages.machine_messages import MachineSilent, Waiting

if TYPE_CHECKING:
    from mlaunch.protocol.messages.channels import AgentSays

_NAMES = 3  # that are shown


def words_on(name: str, record: AgentSays) -> str:
    """Return what to say of a record to the user of the launch; "": nothing."""
    if isinstance(record, NamesLeft):
        return _names_left(name, record)
    if isinstance(record, MachineSilent):
        return f"{name}: {record.text}"
    return f"{name} waits for its other machines, {record.text}" if isinstance(record, Waiting) else ""


def _names_left(name: str, record: NamesLeft) -> str:
    """Says what nobody will remove."""
    shown = ", ".join(record.paths[:_NAMES]) + (", ..." if record.paths[_NAMES:] else "")
    return (
        f"nobody is left to remove {shown} on host {record.host}, {in_bytes(record.size)} of memory that came during "
        f"{name} and that no process uses any more"
    )
