"""What stands behind ranks that stay: a fork server of this machine, or members on several."""

from __future__ import annotations

from typing import Protocol

from mlaunch.caller.launch.handle import Backing


class KeptServer(Backing, Protocol):
    """What is behind ranks that stay."""

    def ended(self) -> bool:
        """Tells whether it has ended."""

    def close(self) -> None:
        """Ends it, if it is theirs alone, after they have ended."""
