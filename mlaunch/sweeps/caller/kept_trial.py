"""A submitted call on ranks that stay (``keep=``), those on the devices that it has leased.

To start ranks, and to end others that are in their way, may take seconds: a thread of the call's own does that, so the
one that drives all launches waits for nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, cast

from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.ranks.keep import on_shared
from mlaunch.caller.ranks.kept_call import KeptCall, RanksFuture
from mlaunch.core.load import room
from mlaunch.protocol.board import Board
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import Context
from mlaunch.sweeps.caller.report_log import ReportLog
from mlaunch.sweeps.caller.run_future import found_as

if TYPE_CHECKING:
    from mlaunch.caller.ranks.session import RanksLaunch


class KeptTrial(RanksFuture):
    """``notify`` is called when there is something to do: ``over``, or a call that can be ended."""

    def __init__(self, options: Options, call: Call, surroundings: Context | None, notify: Callable[[], None]) -> None:
        super().__init__()
        self._call: KeptCall | None = None
        self._asked_to_end = self._asked_to_stop = self._has_begun = False
        self._before: tuple[Board | None, list[int]] = None, []  # what had been reported there
        self._notify = notify
        self.add_done_callback(lambda _: notify())
        threading.Thread(target=self._begin, args=(options, call, surroundings), daemon=True).start()

    def queue(self, call: KeptCall) -> None:
        super().queue(call)
        self._call = call

    def _begin(self, options: Options, call: Call, surroundings: Context | None) -> None:
        try:
            on_shared(options, lambda ranks: ranks.begin(options, call, self), surroundings)
            self._notify()
        except BaseException as error:
            self.set_exception(error)

    def set_running_or_notify_cancel(self) -> bool:
        handle = self._session.handle
        board = handle.history.board  # of the ranks, which have made other calls
        ranks = range(handle.idle_spec.local_world_size if board is not None else 0)
        self._before = board, [board.ring(rank).count() for rank in ranks]  # type: ignore[union-attr]
        self._has_begun = True
        return super().set_running_or_notify_cancel()

    def seen_as(self) -> tuple[str, int] | None:
        """Returns by which ID, and first rank, those find the ranks who look at them; None: there is no call yet."""
        return None if self._call is None else found_as(self._session.handle)

    def attach(self, reports: ReportLog) -> None:
        """Reads its reports where its ranks leave them, as soon as there is a call."""
        if self._has_begun:
            handle, (board, before) = self._session.handle, self._before
            now = handle.history.board
            reports.attach(now, handle.idle_spec, before if now is board else [])

    @property
    def _session(self) -> RanksLaunch:
        """Of the call that there is."""
        return cast("RanksLaunch", cast("KeptCall", self._call).session)

    def end(self) -> None:
        """Ends the call, once there is one; its ranks stay if they are in step."""
        if self._call is not None and not self._asked_to_end:
            self._asked_to_end = True
            self._call.session.interrupt(self._call, CancelledError(), again=False)

    def ask_to_stop(self, reason: str) -> None:
        """Asks the ranks to stop at a step that they agree on, once there is a call."""
        if self._call is not None and not self._asked_to_stop:
            self._asked_to_stop = True
            room("agreed_stop", "caller", "stop()").ask_to_stop(self._call, reason)

    def ended(self) -> Ended:
        """Says how it has ended. What it could not begin for is raised."""
        if self.cancelled():
            raise CancelledError
        error = self.exception()
        if self.make_report is None:
            raise error or CancelledError()
        return Ended(self.make_report, [] if error is not None else self.result(), error)
