"""A call on ranks that stay: what is sent, and the future of its values."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mlaunch.base.misuse import is_misuse
from mlaunch.caller import interrupts
from mlaunch.caller.output.plan import OutputPlan
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.caller.settle import Ended
from mlaunch.caller.start import unpicklable_call
from mlaunch.protocol import destination, explain, payload
from mlaunch.protocol.calls import Call
from mlaunch.protocol.destination import Destination
from mlaunch.protocol.payload import Payload
from mlaunch.protocol.spec import LaunchSpec

_CALL_LIMIT = 16 * 1024  # bytes of a call inside the record that begins it
_log = logging.getLogger("mlaunch")


class RanksFuture(Future[Any]):
    """The future of a call on ranks that stay; its result is the list of their values, in the order of ranks.

    Attributes:
        report: The LaunchReport of the call; None before it is over.
    """

    make_report: Callable[[], LaunchReport] | None = None
    stale: str = ""  # modules, with commas, of which the ranks run older code than their files hold

    @property
    def report(self) -> LaunchReport | None:
        return None if self.make_report is None else self.make_report()


@dataclass(eq=False)
class KeptCall:
    """``number``: of this caller's calls on these ranks; ``spec``: with this call's name and deadline."""

    number: int
    spec: LaunchSpec
    content: Payload
    plan: OutputPlan
    future: RanksFuture = field(default_factory=RanksFuture)
    ended: Ended | None = None
    over: threading.Event = field(default_factory=threading.Event)  # it is settled or cancelled, and that was told

    def settle(self, ended: Ended) -> None:
        """Keeps how it ended; ``tell`` then tells."""
        self.ended, self.future.make_report = ended, ended.report
        self.close()

    def tell(self) -> None:
        """Lets those know who wait for a settled call; it may run code of theirs."""
        try:
            if self.ended is not None and self.ended.error is not None:
                self.future.set_exception(self.ended.error)
            elif self.ended is not None:
                self.future.set_result(self.ended.values)
        except BaseException:  # sys.exit in a callback: whoever drives has to drive on
            _log.exception("a callback of the future of %s raised", self.spec.name)
        self.over.set()

    def cancel(self) -> None:
        """Cancels one that has not begun; it may run code of who waits."""
        self.future.cancel()
        self.close()
        self.over.set()

    def close(self) -> None:
        content, self.content = self.content, Payload()
        content.close()


def pickle_call(to: Destination, name: str, call: Call) -> Payload:
    """Pickles the call. TypeError that names what cannot be pickled."""
    with destination.towards(to), interrupts.allowed():  # it runs code of the user's, and may take long
        try:
            return payload.pack(call, "call", most=_CALL_LIMIT)
        except OSError:
            raise
        except Exception as error:  # whatever a __reduce__ may raise
            if is_misuse(error):  # a handle that does not belong there
                raise
            raise unpicklable_call(call, name, error) from explain.below_the_pickler(error)
