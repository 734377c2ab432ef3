"""The descriptors beside records that carry several: each has a name, and both ends have them in this order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class LaunchFds(NamedTuple):
    """Of ServeNext, and the first of StartLaunch: what a launch begins with. They are the agent's by then."""

    spec: int  # a memfd
    call: int | None  # a memfd; None: the launch is to be prepared, and its call comes by the socket
    socket: int  # to its launcher
    stdout: int
    stderr: int

    @property
    def there(self) -> list[int]:
        """Those that there are."""
        return [fd for fd in self if fd is not None]

    @classmethod
    def of(cls, fds: Sequence[int], *, prepares: bool) -> tuple[LaunchFds, Sequence[int]]:
        """Names what came, and returns the rest. ``prepares``: there is no memfd of a call among them."""
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
        """Names what came. ``held``: how many the record says."""
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
        """Names what came."""
        return cls(fds[0], DirectFds(*fds[1:]) if fds[1:] else None)
