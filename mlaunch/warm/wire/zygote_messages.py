"""The messages of the zygote, over its socket in the user's runtime directory.

caller -> zygote    AskFork                (answered by Forked and, at the fork's end, ForkEnded; or by NotForked)
command -> zygote   AskZygote, KeepZygote  (answered by ZygoteState)
zygote -> starter   ZygoteState; NotReady  (over a socket of the starter's: it is ready, or cannot start)

A process with another confinement than the zygote's gets NotServed, whatever it asks: that is not read. SIGTERM ends a
zygote, so that the kernel decides who may end it.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.server_messages import NotReady


@frozen_record
class CallersProcess:
    """A caller, for the fork that serves it.

    Attributes:
        caller: The caller's pid.
        executable: Its ``sys.executable``: the same program, maybe by another name.
        environ: All variables.
        settings: The settings of the caller's process, from ``protocol.settings``.
        ignored: Signals that the caller ignores.
    """

    caller: int
    executable: str
    environ: Mapping[str, str]
    settings: tuple[tuple[str, object], ...]
    ignored: tuple[int, ...]


@frozen_record
class AskFork:
    """A request for a fork that becomes the sender's fork server.

    Attached: a memfd with CallersProcess, which only the fork reads; the fork's end of the control channel, the
    caller's pidfd, standard input and error output.

    ``path``: the caller's ``sys.path``; ``preload``: modules that the fork is to import, if they are missing;
    ``variables``: the caller's, as ``import_facts.hashed`` returns them.
    """

    path: tuple[str, ...]
    preload: tuple[str, ...]
    variables: bytes


@frozen_record
class Forked:
    """The fork. Attached: its pidfd."""

    pid: int


@frozen_record
class NotForked:
    """The reason why there is no fork. ``ends``: the zygote ends, since a file that it has imported has changed."""

    reason: str
    ends: bool = False


@frozen_record
class ForkEnded:
    """The fork has ended, and was reaped."""

    exitcode: int


@frozen_record
class AskZygote:
    """A request for its state. ``facts``: with its facts, and whether it would serve AskFork's sender."""

    facts: bool = False
    path: tuple[str, ...] = ()
    variables: bytes = b""


@frozen_record
class KeepZygote:
    """A request to stay for so many seconds after its last use, from now on."""

    seconds: float


@frozen_record
class ZygoteState:
    """The state of a zygote.

    Attributes:
        idle: Seconds that it stays after its last use.
        left: Seconds that are left of these.
        serving: The number of living forks.
        served: The number of all forks so far.
        age: Seconds.
        facts: The facts at its import, if they were asked for.
        refusal: Why it would not serve the process that asks, despite equal facts; "": it would.
        notes: Notes for people about the modules that it has imported.
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
    """The reason why nothing from this process is read. ``state``: the zygote's, with its facts."""

    reason: str
    state: ZygoteState


ZygoteHears = AskFork | AskZygote | KeepZygote
ZygoteSays = Forked | ForkEnded | NotForked | NotServed | ZygoteState | NotReady
