"""An IDE's debugger of this process that follows its children, as debugpy does unless it is told otherwise.

What mlaunch starts for itself is not the user's code: it runs without the debugger, which would have each fork of it
wait inside ``os.fork`` until the IDE has attached. Ranks attach by themselves, if that is wanted.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

_stays = contextlib.ExitStack()  # never left


class not_followed:
    """While the block runs, the debugger leaves alone what this thread starts."""

    def __enter__(self) -> None:
        self._patch: Any = getattr(sys.modules.get("_pydev_bundle.pydev_monkey"), "skip_subprocess_arg_patch", None)
        if self._patch is not None:
            self._patch = self._patch()
            self._patch.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._patch is not None:
            self._patch.__exit__(*error)


def stay_unfollowed() -> None:
    """Have the debugger leave alone whatever this thread, of a process that was forked so, forks in its turn."""
    _stays.enter_context(not_followed())
