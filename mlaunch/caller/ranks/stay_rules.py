"""How long ranks stay that nobody calls, and what follows once they are lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class StayRules:
    """Those of one set of ranks, which changes them at any time; each of its launches reads them.

    ``idle_timeout``: seconds from the end of a call, None: no limit. ``yields``: others may end the ranks while they
    are idle, to get their devices. ``restart``: other ranks follow lost ones; ``carry_on``, which is given the launch
    that was lost, starts them, and they take what is left there. ``forget`` is called, in any thread and under a
    launch's lock, when one has ended and nobody has to hear of that any more.
    """

    idle_timeout: float | None = None
    restart: bool = True
    yields: bool = False
    carry_on: Callable[[Any], None] = lambda _: None  # Any: the module that defines launches imports this one
    forget: Callable[[Any], None] = lambda _: None
