"""Where the ranks of a machine come together, before it says to the gate once how many of them have come.

So the gate's work for a meeting of all ranks (``barrier`` at a store) is for each machine, not for each rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# Nobody says that each rank meets once. Counted here, 8,192 ranks took the gate 0.4 s instead of 2.0.
_PATIENCE = 1.0  # seconds for the rest of a machine's ranks, in case that not each of them is to come

Go = Callable[[], None]


class Meetings:
    """What ranks of one machine meet for, at its link.

    ``ranks``, ``world_size``: how many there are here, and in all. ``tell(number, count, size, key)``: says to the gate
    that so many have come to what it is to call by that number.
    """

    def __init__(self, ranks: int, world_size: int, tell: Callable[[int, int, int, bytes], None]) -> None:
        self._ranks = ranks
        self._world_size = world_size
        self._tell = tell
        self._coming: dict[tuple[bytes, int], dict[object, Go]] = {}
        self._told: dict[int, dict[object, Go]] = {}
        self._begun = 0

    def come(self, who: object, key: bytes, size: int, go: Go) -> None:
        """Takes in one; ``go`` is called once ``size`` are there, here and elsewhere."""
        here = self._coming.setdefault((key, size), {})
        here[who] = go
        # Only what all ranks are to come to is held back: for less, ranks of this machine may wait for nobody here.
        if size != self._world_size or len(here) == self._ranks:
            self._pass_on(key, size)
        elif len(here) == 1:
            asyncio.get_running_loop().call_later(_PATIENCE, self._pass_on, key, size)

    def leave(self, who: object) -> bool:
        """Forgets one that does not wait any more; False if it did not wait. Whoever was told of it counts it still."""
        return any([here.pop(who, None) is not None for here in (*self._coming.values(), *self._told.values())])

    def passed(self, number: int) -> None:
        """Takes in that all have come, as the gate says."""
        for go in self._told.pop(number, {}).values():
            go()

    def _pass_on(self, key: bytes, size: int) -> None:
        here = self._coming.pop((key, size), None)
        if here:
            self._told[self._begun] = here
            self._begun += 1
            self._tell(self._begun - 1, len(here), size, key)
