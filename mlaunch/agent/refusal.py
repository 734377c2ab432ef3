"""How an agent ends that has no launch, with the reason for its launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from mlaunch.protocol.messages.machine_messages import Refused

if TYPE_CHECKING:
    from mlaunch.protocol.messages.channels import AgentsEnd


class NoLaunchError(Exception):
    """The machines did not come together, or have no room; the launcher has been told."""


def refuse(launcher: AgentsEnd, why: str, *, late: bool = False) -> NoReturn:
    """Tell the launcher why there is no launch. ``late``: its deadline has passed."""
    launcher.try_send(Refused(why, late=late))
    raise NoLaunchError
