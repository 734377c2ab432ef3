"""A submitted call on ranks that stay (``keep=``), on the devices that it has leased.

Starting ranks, and ending others that hold the devices, may take seconds: the call has a thread for that, so that the
thread that drives all launches never blocks.
"""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, cast

from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.options.launch_options import Options
from mlaunch.core.load import room
from mlaunch.protocol.board import Board
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import Context
from mlaunch.ranks.caller.keep import on_shared
from mlaunch.ranks.caller.kept_call import KeptCall, RanksFuture
from mlaunch.sweeps.caller.launch_loop import loop
from mlaunch.sweeps.caller.run_future import ReportLog, found_as

if TYPE_CHECKING:
    from mlaunch.ranks.caller.ranks_launch import RanksLaunch


class KeptTrial(RanksFuture):
    """The future of the call. It wakes the loop when it has begun or is over."""

    def __init__(self, options: Options, call: Call, surroundings: Context | None) -> None:
        super().__init__()
        self._call: KeptCall | None = None
        self._asked_to_end = self._asked_to_stop = self._has_begun = False
        self._before: tuple[Board | None, list[int]] = None, []  # how much the ranks had reported before
        self.add_done_callback(lambda _: loop.notify())
        threading.Thread(target=self._begin, args=(options, call, surroundings), daemon=True).start()

    def queue(self, call: KeptCall) -> None:
        super().queue(call)
        self._call = call

    def _begin(self, options: Options, call: Call, surroundings: Context | None) -> None:
        try:
            on_shared(options, lambda ranks: ranks.begin(options, call, self), surroundings)
            loop.notify()
        except BaseException as error:
            self.set_exception(error)

    def set_running_or_notify_cancel(self) -> bool:
        handle = self._launch.handle
        board = handle.history.board  # of the ranks, which have had other calls
        ranks = range(handle.idle_spec.local_world_size if board is not None else 0)
        self._before = board, [board.ring(rank).count() for rank in ranks]  # type: ignore[union-attr]
        self._has_begun = True
        return super().set_running_or_notify_cancel()

    def seen_as(self) -> tuple[str, int] | None:
        """Return the ID and first rank under which ``mlaunch ps`` finds the ranks; None: there is no call yet."""
        return None if self._call is None else found_as(self._launch.handle)

    def attach(self, reports: ReportLog) -> None:
        """Have a log read what the ranks report, once there is a call."""
        if self._has_begun:
            handle, (board, before) = self._launch.handle, self._before
            now = handle.history.board
            reports.attach(now, handle.idle_spec, before if now is board else [])

    @property
    def _launch(self) -> RanksLaunch:
        """The ranks of the call, which has begun."""
        return cast("RanksLaunch", cast("KeptCall", self._call).launch)

    def end(self) -> None:
        """End the call, once there is one; its ranks stay if they are in step."""
        if self._call is not None and not self._asked_to_end:
            self._asked_to_end = True
            self._call.launch.interrupt(self._call, CancelledError(), again=False)

    def ask_to_stop(self, reason: str) -> None:
        """Ask the ranks to stop at a step that they agree on, once there is a call."""
        if self._call is not None and not self._asked_to_stop:
            self._asked_to_stop = True
            room("agreed_stop", "caller", "stop()").ask_to_stop(self._call, reason)

    def ended(self) -> Ended:
        """Return how it has ended. Raise if it could not begin."""
        if self.cancelled():
            raise CancelledError
        error = self.exception()
        if self.make_report is None:
            raise error or CancelledError()
        return Ended(self.make_report, [] if error is not None else self.result(), error)
