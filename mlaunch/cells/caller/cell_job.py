"""A cell that runs while the notebook goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

from mlaunch.caller.ranks.kept_call import KeptCall, RanksFuture
from mlaunch.caller.ranks.session import RanksLaunch
from mlaunch.cells.caller.cell_result import result_of
from mlaunch.cells.wire import CellAnswer
from mlaunch.core.load import room


class CellJob(RanksFuture):
    """The future of a cell's ``CellResult``.

    Attributes:
        name: What the notebook calls it.
        call: It, once it was queued.
        sink: Takes what its ranks print. None: that is shown as always.
        begins: Called when it does, after the cells before it, under the lock of the ranks.
    """

    call: KeptCall | None = None
    sink: Callable[[int, bytes], None] | None = None
    begins: Callable[[], None] | None = None

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def queue(self, call: KeptCall) -> None:
        """Makes the ranks print where the job is shown."""
        super().queue(call)
        self.call = call
        if self.sink is not None:
            call.plan = dataclasses.replace(call.plan, area=None, sink=self.sink)

    def set_running_or_notify_cancel(self) -> bool:
        """Takes in that the cell begins; False if it was cancelled."""
        begins = super().set_running_or_notify_cancel()
        if begins and self.begins is not None:
            self.begins()
        return begins

    def set_result(self, result: Sequence[CellAnswer | None]) -> None:
        """Takes what the ranks have answered."""
        super().set_result(result_of(result))

    def cancel(self) -> bool:
        """Takes the cell out of the queue, or ends it as the stop button would; False if it is over.

        ``result`` then raises ``CancelledError``.
        """
        if super().cancel():
            return True
        session = self._session
        if self.done() or self.call is None or session is None:
            return False
        session.interrupt(self.call, CancelledError(f"{self.name} was cancelled"))
        return True

    def stop(self) -> bool:
        """Asks its ranks to stop at a step that they agree on, where ``mlaunch.stopping()`` is true; False: it is over.

        Does not wait.
        """
        call = self.call
        if self.done() or call is None:
            return False
        room("agreed_stop", "caller", "stop()").ask_to_stop(call, "asked")
        return True

    @property
    def _session(self) -> RanksLaunch | None:
        found: Any = getattr(self.call, "session", None)
        return found if isinstance(found, RanksLaunch) else None

    def __repr__(self) -> str:
        state = "done" if self.done() else "running" if self.running() else "waiting"
        return f"<CellJob {self.name}: {state}>"
