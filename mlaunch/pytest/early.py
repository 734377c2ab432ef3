"""Starting the fork server while pytest still collects."""

from __future__ import annotations

import os
import sys

from mlaunch.caller.server.warm import warm_server

PRELOADED = ("pytest", "mlaunch.pytest.body")  # what all ranks of tests import
_RECORDER = "coverage"  # they do if this process has


def start() -> None:
    """Starts it, with what ranks of tests import; a server that is there already stays as it is."""
    if not warm_server.started:
        wanted = (*PRELOADED, *((_RECORDER,) if _RECORDER in sys.modules else ()))
        warm_server.preload = (*warm_server.preload, *(name for name in wanted if name not in warm_server.preload))
    warm_server.get(os.environ)
