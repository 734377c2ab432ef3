"""Starting the fork server while pytest still collects."""

from __future__ import annotations

import os

from mlaunch.caller.server.warm import warm_server

PRELOADED = ("pytest", "mlaunch.pytest.body")  # what all ranks of tests import


def start() -> None:
    """Starts it, with what ranks of tests import; a server that is there already stays as it is."""
    if not warm_server.started:
        warm_server.preload = (*warm_server.preload, *(name for name in PRELOADED if name not in warm_server.preload))
    warm_server.get(os.environ)
