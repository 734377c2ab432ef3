"""The messages between the parts of ``profile=``."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mlaunch.base.frozen_record import frozen_record


@frozen_record
class ProfileOrder:
    """An order to profile some steps of some ranks. ``ranks``: None: all."""

    directory: str  # where each rank writes its part; see ``part_of``
    first: int
    last: int  # the step after them
    ranks: tuple[int, ...] | None = None

    def wants(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks

    def part_of(self, rank: int) -> str:
        """Return the path of a rank's part."""
        return f"{self.directory}/rank-{rank}.json"

    def begun_by(self, rank: int) -> str:
        """Return the path of a file that exists once the rank has come to the first of these steps."""
        return f"{self.directory}/rank-{rank}.begun"

    def has_begun(self, rank: int) -> bool:
        return os.path.lexists(self.begun_by(rank))

    def written_by(self, rank: int) -> str:
        """Return the path of the rank's part, compressed if it has come from another machine; "" if there is none."""
        path = self.part_of(rank)
        return next((found for found in (path, f"{path}.gz") if os.path.exists(found)), "")


@dataclass(frozen=True)
class TracePart:
    """A compressed piece of a rank's trace."""

    rank: int
    data: bytes
