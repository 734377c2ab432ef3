"""A debugger of this process that follows its children, as debugpy does for IDEs unless it is told otherwise.

What mlaunch starts for itself is not the user's code: it runs without the debugger, which would have each fork of it
wait inside ``os.fork`` until the IDE has attached. Ranks attach by themselves (``rank/debugging/ide.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

_stays = contextlib.ExitStack()  # never left


class not_debugged:
    """While the block runs, the debugger leaves alone what this thread starts."""

    def __enter__(self) -> None:
        self._patch: Any = getattr(sys.modules.get("_pydev_bundle.pydev_monkey"), "skip_subprocess_arg_patch", None)
        if self._patch is not None:
            self._patch = self._patch()
            self._patch.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._patch is not None:
            self._patch.__exit__(*error)


def stay_undebugged() -> None:
    """Have the debugger leave alone whatever this thread, of a process that was forked so, forks in its turn."""
    _stays.enter_context(not_debugged())


def address() -> str:
    """Return where debugpy awaits children of this process, as ``rank/debugging/ide.py`` reads it; "": nowhere."""
    setup = getattr(getattr(sys.modules.get("pydevd"), "SetupHolder", None), "setup", None) or {}
    debugpy = getattr(sys.modules.get("debugpy"), "__file__", None)
    if not setup.get("multiprocess") or debugpy is None:
        return ""
    found = {
        "host": setup["client"],
        "port": setup["port"],
        "server_token": setup.get("access-token"),
        "client_token": setup.get("client-access-token"),
        "parent": os.getpid(),
        # An IDE brings its own debugpy, which is not among the user's packages.
        "path": os.path.dirname(os.path.dirname(debugpy)),
    }
    return json.dumps(found)
