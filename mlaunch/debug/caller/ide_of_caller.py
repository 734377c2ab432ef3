"""Where an IDE that debugs this process, and follows its children, awaits them."""

from __future__ import annotations

import json
import os
import sys


def address() -> str:
    """Return where debugpy awaits children of this process, as ``rank/ide.py`` reads it; "": nowhere."""
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
