"""What a driver of ranks that stay needs of them, and of the calls that are waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from mlaunch.caller.launch.watchdog import Backing
from mlaunch.caller.ranks.stay_rules import StayRules


class Awaited(Protocol):
    """What is waited for. ``wait`` is for those who do not drive."""

    over: bool

    def wait(self) -> None: ...


Call = TypeVar("Call", bound=Awaited, contravariant=True)


class Driven(Protocol[Call]):
    """What is driven. ``step`` takes in what has come, ``hear_values`` too until a call is over; they take the lock.

    ``tell`` tells what came of that, without the lock, since it runs user code. It tells whatever is over: by
    whom it is told may be any thread that tells just then.
    """

    lock: threading.RLock
    ended: threading.Event
    rules: StayRules

    @property
    def idle(self) -> bool: ...

    def watch(self, fd: int) -> Callable[[], bool]: ...

    def step(self) -> None: ...

    def tell(self) -> None: ...

    def hear_values(self, call: Call) -> None: ...

    def fileno(self) -> int: ...

    def timeout(self) -> float | None: ...


class KeptServer(Backing, Protocol):
    """What is behind ranks that stay."""

    def ended(self) -> bool:
        """Tells whether it has ended."""

    def close(self) -> None:
        """Ends the server, if it serves these ranks alone, after they have ended."""
