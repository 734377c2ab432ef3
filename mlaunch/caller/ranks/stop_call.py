"""Asks the ranks that stay to stop in one of their calls."""

from __future__ import annotations

from mlaunch.caller.ranks.kept_call import KeptCall
from mlaunch.caller.ranks.session import RanksLaunch


def ask_to_stop(session: RanksLaunch, reason: str, call: KeptCall | None = None) -> bool:
    """Asks them to stop in this call once it runs (None: in the present one); False: there is none."""
    wanted = call or session.present
    if wanted is not None:
        wanted.stop_reason = reason
        session.ask_to_stop()
    return wanted is not None
