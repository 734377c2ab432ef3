"""The debugger of an IDE, which follows the children of this process, as debugpy does by default.

Processes that mlaunch starts for itself run without the debugger, in which each fork of them would wait inside
``os.fork`` until the IDE has attached. Ranks attach by themselves, if that is wanted.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

_stays = contextlib.ExitStack()  # never left


class not_followed:
    """A block in which the debugger does not follow what this thread starts."""

    def __enter__(self) -> None:
        self._patch: Any = getattr(sys.modules.get("_pydev_bundle.pydev_monkey"), "skip_subprocess_arg_patch", None)
        if self._patch is not None:
            self._patch = self._patch()
            self._patch.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._patch is not None:
            self._patch.__exit__(*error)


def stay_unfollowed() -> None:
    """Keep the debugger from following what this thread forks from now on."""
    _stays.enter_context(not_followed())
