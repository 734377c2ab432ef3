"""The records between launchers, a fork server and the agents that it keeps, with the descriptors that go along.

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

COUNT_TIMEOUT = 300  # seconds: loading a driver for many devices takes some of them


@frozen_record
class Ready:
    """The facts about the fork server's torch. ``accelerator`` is the kind it was built for, None for a CPU build.

    ``lacks``: what mlaunch needs and this torch does not have, in a sentence.
    """

    torch_version: str
    accelerator: str | None
    backends: tuple[str, ...]
    own_backend: str | None = None  # the backend that torch uses for tensors of that kind
    runtime: str | None = None  # whose variables hide devices: "rocm" where the kind is "cuda"
    lacks: str = ""


@frozen_record
class NotReady:
    """The reason why the fork server cannot serve: the traceback of a failed import, or one complete line."""

    reason: str


@frozen_record
class CountDevices:
    """A request to count the accelerators that the environment in the attached memfd shows.

    The answer comes on the attached socket. ``named``: it must also say which they are.
    """

    named: bool = False


@frozen_record
class DeviceCount:
    """The answer to CountDevices. ``error`` is empty unless the driver could not be asked.

    ``names``: which devices they are, whatever numbers they have.
    """

    count: int
    error: str = ""
    names: tuple[str, ...] = ()


@frozen_record
class Retire:
    """A request to the fork server to end once its running launches have ended."""


@frozen_record
class Free:
    """The agent's launch is over, all went well, and nothing of it is left in the agent."""


@frozen_record
class ServeNext:
    """A request to a free agent to serve one more launch.

    Attached: ``LaunchFds``, and what its processes hold of its devices. ``prepares``: the launch is to be prepared, so
    there is no call memfd.
    """

    prepares: bool = False


@frozen_record
class StartLaunch:
    """A request to start a launch. Attached: ``StartFds``. ``held``: how many of them its processes must hold.

    ``more``: similar launches may follow, for which its agent can stay. ``directory``: removed once its agent is gone;
    the agent does that unless it is killed; "": none. ``grace_period``: seconds in which its ranks must end.
    """

    more: bool = False
    directory: str = ""
    held: int = 0
    grace_period: float = 0.0


@frozen_record
class PrepareNext:
    """A request for a launch like the last one, once none has run for a moment. Attached: its socket.

    If there are more descriptors, they are ``LikeFds``, for a launch like these instead. ``soon``: also while others
    run, because its call waits for what they hold.
    """

    soon: bool = False


# Descriptors


class LaunchFds(NamedTuple):
    """The descriptors of ServeNext, and the first of StartLaunch: what a launch begins with.

    The agent owns them from then on.
    """

    spec: int  # a memfd
    call: int | None  # a memfd; None: the launch is to be prepared, and its call comes by the socket
    socket: int  # to its launcher
    stdout: int
    stderr: int

    @property
    def there(self) -> list[int]:
        """Return the descriptors that exist."""
        return [fd for fd in self if fd is not None]

    @classmethod
    def of(cls, fds: Sequence[int], *, prepares: bool) -> tuple[LaunchFds, Sequence[int]]:
        """Name the descriptors that came, and return the rest. ``prepares``: no memfd of a call is among them."""
        count = len(cls._fields) - prepares
        spec, *others = fds[:count]
        return cls(spec, None if prepares else others.pop(0), *others), fds[count:]


class StartFds(NamedTuple):
    """The descriptors of StartLaunch."""

    launch: LaunchFds
    following: int | None  # the socket of the launch that is to be prepared next
    held: Sequence[int]  # what the processes are to hold

    @classmethod
    def of(cls, fds: Sequence[int], held: int) -> StartFds:
        """Name the descriptors that came. ``held``: how many the record says."""
        own, first_held = len(LaunchFds._fields), len(fds) - held
        following = fds[own] if own < first_held else None
        return cls(LaunchFds(*fds[:own]), following, fds[first_held:])


class LikeFds(NamedTuple):
    """The descriptors of PrepareNext, if the next launch is not like the last one."""

    spec: int  # a memfd
    stdout: int
    stderr: int


class DirectFds(NamedTuple):
    """The descriptors by which ranks that stay answer their launcher directly."""

    answers: int  # the end of the queue on which they answer
    all_there: int  # can be read once all have answered


class BoardFds(NamedTuple):
    """The descriptors of RanksStarting."""

    board: int
    direct: DirectFds | None  # None: the ranks do not stay

    @classmethod
    def of(cls, fds: Sequence[int]) -> BoardFds:
        """Name the descriptors that came."""
        return cls(fds[0], DirectFds(*fds[1:]) if fds[1:] else None)


ServerHears = StartLaunch | PrepareNext | CountDevices | Retire
ServerSays = Ready | NotReady
CountingSays = DeviceCount  # a fork of the fork server that counts devices
# The fork server and an agent that it keeps for the next launch.
RestingAgentHears = ServeNext
RestingAgentSays = Free
