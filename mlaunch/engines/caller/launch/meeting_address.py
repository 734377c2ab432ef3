"""At which of its addresses the first machine of a launch is found by the others: each of them tries all.

A machine may have several, of which some lead nowhere from elsewhere: a bridge for containers, a network for storage.
Each machine's own part is in ``mlaunch/engines/member/reachability.py``.
"""

from __future__ import annotations

from mlaunch.base.exceptions import LaunchError
from mlaunch.engines.caller.launch.placed_machines import PlacedMachines
from mlaunch.engines.wire.member_messages import Listen, Reach

_ANSWER_TIMEOUT = 60.0  # seconds for machines to tell, some of which may be busy


def address_for_all(placed: PlacedMachines, port: int) -> str:
    """Returns the first one that all others have reached at that port, where the first machine listens meanwhile.

    Raises:
        LaunchError: There is none.
    """
    if not placed.meets_at:
        placed.meets_at = _tried(placed, port)
    return placed.meets_at


def _tried(placed: PlacedMachines, port: int) -> str:
    first, *others = placed.machines
    offered = first.given.addresses
    if not placed.ask([first], Listen(port), _ANSWER_TIMEOUT)[0].listens:  # as its agent will say, too
        return offered[0]
    told = [one.failures for one in placed.ask(others, Reach(offered, port), _ANSWER_TIMEOUT)]
    placed.ask([first], Listen(None), _ANSWER_TIMEOUT)
    for address, *failures in zip(offered, *told, strict=True):
        if not any(failures):
            return str(address)
    # Named is the machine that reached least: it is the one to look at.
    cut = max(range(len(others)), key=lambda number: sum(map(bool, told[number])))
    tried = ", ".join(f"{address} ({words})" for address, words in zip(offered, told[cut], strict=True) if words)
    raise LaunchError(
        f"host {others[cut].host} does not reach host {first.host} at port {port}: tried {tried}; does a firewall "
        f"stand between them? Open the port, choose one that is open (port=), or say where others find the first "
        f"machine (master_ip=)"
    )
