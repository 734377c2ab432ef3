"""How an agent ends that has no launch, with the reason for its launcher."""

from __future__ import annotations

from typing import NoReturn

from mlaunch.protocol.messages import AgentsEnd, Refused


class NoLaunchError(Exception):
    """The machines did not come together, or have no room; the launcher has been told."""


def refuse(launcher: AgentsEnd, why: str, *, late: bool = False) -> NoReturn:
    """Tell the launcher why there is no launch. ``late``: its deadline has passed."""
    launcher.try_send(Refused(why, late=late))
    raise NoLaunchError
