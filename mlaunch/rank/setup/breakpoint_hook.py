"""``breakpoint()`` in a rank, which has no terminal."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


class LateHook:
    """Is ``sys.breakpointhook`` until a feature has one of its own. ``who`` says "rank 1 of train()"."""

    def __init__(self, who: Callable[[], str]) -> None:
        self._who = who
        self._pid = os.getpid()

    @property
    def __call__(self) -> Callable[..., Any]:
        """What is called in its place.

        It is returned and not called here: a debugger that stops in its caller's frame would find one of ours.
        """
        from mlaunch.core.load import at_breakpoint  # which most ranks do not need

        return at_breakpoint(self._who(), self._pid)
