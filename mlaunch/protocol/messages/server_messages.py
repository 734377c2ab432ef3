"""What a fork server is asked for, and what it asks of an agent that has served a launch.

launcher -> fork server   CountDevices, StartLaunch, Retire     (a seqpacket socket, with file descriptors)
launcher -> fork server   Prepare                               (see prepared.py)
agent -> fork server      Free                                  (a channel for each agent)
fork server -> agent      ServeNext                             (the end of that channel means: leave)
"""

from __future__ import annotations

from mlaunch.base.frozen_record import frozen_record

COUNT_TIMEOUT = 300  # seconds: a driver that has to be loaded, for many devices, takes some of them


@frozen_record
class CountDevices:
    """Asks how many accelerators the environment in the attached memfd shows; answered on the attached socket.

    ``named``: and which these are.
    """

    named: bool = False


@frozen_record
class DeviceCount:
    """``error`` is empty unless the driver could not be asked. ``names``: which they are, whoever numbers them."""

    count: int
    error: str = ""
    names: tuple[str, ...] = ()


@frozen_record
class StartLaunch:
    """Starts a launch. Attached: ``StartFds``. ``held``: how many descriptors of those its processes are to hold.

    ``more``: others like it may follow, for which its agent can stay. ``directory``: removed when its agent is gone,
    who does that unless it is killed; "": none. ``grace_period``: seconds that its ranks have to end in.
    """

    more: bool = False
    directory: str = ""
    held: int = 0
    grace_period: float = 0.0


@frozen_record
class Retire:
    """Asks the fork server to end once its running launches have."""


@frozen_record
class Free:
    """The agent's launch is over, all went well, and nothing of it is left in the agent."""


@frozen_record
class ServeNext:
    """Asks a free agent to serve one more launch.

    Attached: ``LaunchFds``; what its processes hold of its devices. ``prepares``: it is to be prepared, so there is no
    call memfd.
    """

    prepares: bool = False
