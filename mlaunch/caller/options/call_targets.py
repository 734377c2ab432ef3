"""What ``ranks=`` and ``engine=`` have to be: types for what is defined in rooms above the options.

``options`` are ``launch_options.Options``, whose module imports this one; no circle of imports, not even for types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mlaunch.caller.launch.settle import Ended
    from mlaunch.protocol.calls import Call


class TakesCalls(Protocol):
    """Ranks that stay: ``mlaunch.Ranks``."""

    def call(self, options: Any, call: Call) -> Ended:
        """Makes a call and waits for it."""


class PlacesRanks(Protocol):
    """An engine, or machines that one holds."""

    def call(self, options: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ended:
        """Makes a call on ranks of its own, and waits for it."""

    def open_session(self, options: Any, rules: Any) -> Any:
        """Starts ranks that stay, a ``RanksLaunch``; does not wait for them."""
