"""What a fork server is asked for and says, what it asks of an agent that has served a launch, and which fds go along.

launcher -> fork server   CountDevices, StartLaunch, PrepareNext, Retire   (a seqpacket socket, with file descriptors)
fork server -> launcher   Ready or NotReady
agent -> fork server      Free                                  (a channel for each agent)
fork server -> agent      ServeNext                             (the end of that channel means: leave)

Descriptors beside a record that carries several have names, in the order in which both ends have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mlaunch.base.frozen_record import frozen_record

COUNT_TIMEOUT = 300  # seconds: a driver that has to be loaded, for many devices, takes some of them


@frozen_record
class Ready:
    """What the fork server's torch offers. ``accelerator`` is the kind it was built for, None for a CPU build.

    ``lacks``: what mlaunch takes of it and it has not, in a sentence.
    """

    torch_version: str
    accelerator: str | None
    backends: tuple[str, ...]
    own_backend: str | None = None  # the one that torch takes for tensors of that kind
    runtime: str | None = None  # whose variables hide devices: "rocm" where the kind is "cuda"
    lacks: str = ""


@frozen_record
class NotReady:
    """Why the fork server cannot serve: the traceback of an import that failed, or one line that says it all."""

    reason: str


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
class PrepareNext:
    """Asks for a launch like the last one, once none has run for a moment. Attached: its socket.

    If there are more descriptors, they are ``LikeFds``, for one that is like these instead. ``soon``: while others run,
    too: its call waits for what they have.
    """

    soon: bool = False


# Descriptors


class LaunchFds(NamedTuple):
    """Of ServeNext, and the first of StartLaunch: what a launch begins with. They are the agent's by then."""

    spec: int  # a memfd
    call: int | None  # a memfd; None: the launch is to be prepared, and its call comes by the socket
    socket: int  # to its launcher
    stdout: int
    stderr: int

    @property
    def there(self) -> list[int]:
        """Return those that there are."""
        return [fd for fd in self if fd is not None]

    @classmethod
    def of(cls, fds: Sequence[int], *, prepares: bool) -> tuple[LaunchFds, Sequence[int]]:
        """Name what came, and return the rest. ``prepares``: there is no memfd of a call among them."""
        count = len(cls._fields) - prepares
        spec, *others = fds[:count]
        return cls(spec, None if prepares else others.pop(0), *others), fds[count:]


class StartFds(NamedTuple):
    """Of StartLaunch."""

    launch: LaunchFds
    following: int | None  # the socket of the launch that is to be prepared next
    held: Sequence[int]  # what the processes are to hold

    @classmethod
    def of(cls, fds: Sequence[int], held: int) -> StartFds:
        """Name what came. ``held``: how many the record says."""
        own, first_held = len(LaunchFds._fields), len(fds) - held
        following = fds[own] if own < first_held else None
        return cls(LaunchFds(*fds[:own]), following, fds[first_held:])


class LikeFds(NamedTuple):
    """What the next launch is to be like; of PrepareNext, if that is not the last one."""

    spec: int  # a memfd
    stdout: int
    stderr: int


class DirectFds(NamedTuple):
    """By which ranks that stay answer their launcher directly."""

    answers: int  # the end of the queue on which they do
    all_there: int  # can be read once all have


class BoardFds(NamedTuple):
    """Of RanksStarting."""

    board: int
    direct: DirectFds | None  # None: the ranks do not stay

    @classmethod
    def of(cls, fds: Sequence[int]) -> BoardFds:
        """Name what came."""
        return cls(fds[0], DirectFds(*fds[1:]) if fds[1:] else None)


ServerHears = StartLaunch | PrepareNext | CountDevices | Retire
ServerSays = Ready | NotReady
CountingSays = DeviceCount  # a fork of the fork server that counts devices
# The fork server and an agent that it keeps for the next launch.
RestingAgentHears = ServeNext
RestingAgentSays = Free
