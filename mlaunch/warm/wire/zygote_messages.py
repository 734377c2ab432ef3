"""What a fork server that stays, the zygote, is asked for, over its socket in the user's runtime directory.

caller -> zygote    AskFork                (answered by Forked and, at the fork's end, ForkEnded; or by NotForked)
command -> zygote   AskZygote, KeepZygote  (answered by ZygoteState)
zygote -> starter   ZygoteState; NotReady  (over a socket of the starter's own: whether the zygote can be had)

Who is confined otherwise than the zygote gets NotServed, whatever he asks, since that is not read. A zygote ends
by SIGTERM, so that the kernel says who may end it.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.server_messages import NotReady


@frozen_record
class CallersProcess:
    """What a fork that serves a caller has of this caller.

    Attributes:
        caller: The caller's pid.
        executable: Its ``sys.executable``: the same program, maybe by another name.
        environ: All variables.
        settings: The settings of the caller's process, as ``protocol.settings`` has them.
        ignored: Signals that the caller ignores.
    """

    caller: int
    executable: str
    environ: Mapping[str, str]
    settings: tuple[tuple[str, object], ...]
    ignored: tuple[int, ...]


@frozen_record
class AskFork:
    """Asks for a fork that becomes the sender's fork server. Attached: a memfd with CallersProcess, which the fork
    alone reads; the fork's end of the control channel, the caller's pidfd, standard input and error output.

    ``path``: the caller's ``sys.path``; ``preload``: modules that the fork is to import, if they are not there;
    ``variables``: the caller's, as ``import_facts.hashed`` gives them.
    """

    path: tuple[str, ...]
    preload: tuple[str, ...]
    variables: bytes


@frozen_record
class Forked:
    """The fork is there. Attached: its pidfd."""

    pid: int


@frozen_record
class NotForked:
    """Why there is none. ``ends``: the zygote ends, since something has changed that it has imported."""

    reason: str
    ends: bool = False


@frozen_record
class ForkEnded:
    """The fork has ended, and was reaped."""

    exitcode: int


@frozen_record
class AskZygote:
    """Asks for its state. ``facts``: whether its facts are wanted, too, and whether it would serve AskFork's sender."""

    facts: bool = False
    path: tuple[str, ...] = ()
    variables: bytes = b""


@frozen_record
class KeepZygote:
    """Makes a zygote stay for so many seconds after its last use, from now on."""

    seconds: float


@frozen_record
class ZygoteState:
    """Says how it stands.

    Attributes:
        idle: Seconds that it stays after its last use.
        left: What is left of these.
        serving: Forks that live.
        served: All forks that there were.
        age: Seconds.
        facts: What counted when it imported, if that was asked for.
        refusal: Why it would not serve who asks, whose facts are the same; "": it would.
        notes: What a person should know of the modules that it has imported.
    """

    pid: int
    preload: tuple[str, ...]
    idle: float
    left: float
    serving: int
    served: int
    age: float
    facts: Mapping[str, str]
    refusal: str = ""
    notes: tuple[str, ...] = ()


@frozen_record
class NotServed:
    """Why nothing is read of what this process sends. ``state``: the zygote's, with its facts."""

    reason: str
    state: ZygoteState


# What comes and what goes, as types of the channel.
ZygoteHears = AskFork | AskZygote | KeepZygote
ZygoteSays = Forked | ForkEnded | NotForked | NotServed | ZygoteState | NotReady
