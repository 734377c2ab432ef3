"""``breakpoint()`` in a rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlaunch.debug.rank.rank_pdb import Debugger

_USUAL = {"", "pdb.set_trace"}  # of PYTHONBREAKPOINT


class BreakpointHook:
    """``sys.breakpointhook`` of a rank, whose process is ``pid``. ``debugger`` None: nobody debugs."""

    def __init__(self, who: str, debugger: Debugger | None, pid: int) -> None:
        self._who = who
        self.debugger = debugger
        self._pid = pid

    @property
    def __call__(self) -> Callable[..., Any]:
        """The function that runs instead: what PYTHONBREAKPOINT says, or what opens a prompt.

        It is not called here: a debugger that stops in its caller's frame would stop in mlaunch's.
        """
        # Read at each breakpoint(), as Python does: a program may set it while it runs.
        is_usual = os.environ.get("PYTHONBREAKPOINT", "") in _USUAL
        return self._open_prompt if is_usual else sys.__breakpointhook__

    def _open_prompt(self, *_args: Any, **_kwargs: Any) -> None:
        """Open a prompt at the line that calls it.

        Raises:
            RuntimeError: There is nobody to ask.
        """
        # A child has the rank's channel open, too, and the two would take each other's lines.
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"breakpoint() in process {os.getpid()}, a child of {self._who}: only the rank itself has a prompt. "
                f"If this is a worker of a DataLoader, num_workers=0 runs its code in the rank"
            )
        if self.debugger is None:
            raise RuntimeError(
                f"breakpoint() in {self._who}, which has no terminal: debug=True, an option of launcher, opens a "
                f"prompt where the call was made, and --pdb one for tests on ranks; PYTHONBREAKPOINT=0 skips all "
                f"breakpoints"
            )
        self.debugger.stop_at(sys._getframe(1))
