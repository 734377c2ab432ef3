"""The event loop of gates and links: uvloop's if it is installed (extra ``scale``), else asyncio's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any

VARIABLE = "MLAUNCH_UVLOOP"  # "0": asyncio's in any case


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a process's only coroutine to its end."""
    if os.environ.get(VARIABLE) != "0":
        try:
            # Most of the time that gates and links take is asyncio's, in Python: six turns of the loop for a new
            # connection, a few calls for each byte. uvloop, in C, saves a third for links, and a fifth for the gate.
            import uvloop
        except ImportError:
            pass
        else:
            uvloop.run(main)
            return
    asyncio.run(main)
