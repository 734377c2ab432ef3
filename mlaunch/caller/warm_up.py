"""Starting the fork server before it is needed."""

from __future__ import annotations

import os


def warm_up() -> None:
    """Starts this process's fork server in the background and returns at once.

    The first launch of a process otherwise waits while the fork server imports torch. Called as a script's first
    statement, before its own ``import torch``, the two imports run at the same time. A server that is already there
    is kept.
    """
    from mlaunch.caller.warm import warm_server

    warm_server.get(os.environ)
