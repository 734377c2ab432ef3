"""The destination of the arguments that are being pickled: held and scattered values depend on it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Destination:
    """Ranks that stay, as a destination.

    ``owner``: their launch; ``name``: for people; ``world_size``: their number; ``used``: what was pickled that only
    these ranks understand.
    """

    owner: str
    name: str
    world_size: int
    used: list[int] = field(default_factory=list)


# By thread: a second one may be pickling for other ranks, or for none.
class _PresentTarget(threading.local):
    destination: Destination | None = None


_present = _PresentTarget()


def present() -> Destination | None:
    """Return the destination of this thread's pickling; None if it is not for ranks that stay."""
    return _present.destination


class towards:
    """A block whose pickling goes to a destination."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._before: Destination | None = None

    def __enter__(self) -> None:
        self._before, _present.destination = _present.destination, self._destination

    def __exit__(self, *_: object) -> None:
        _present.destination = self._before
