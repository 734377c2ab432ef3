"""A call on ranks that stay, as its caller waits for it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.ranks.kept_call import KeptCall
from mlaunch.protocol.payload import Payload


class Ranks:
    """Ranks that are interrupted while they are waited for. ``others``: which take the call over as they end."""

    def __init__(self, others: Ranks | None = None) -> None:
        self._others = others
        self.asked: list[bool] = []

    def drive(self, _: KeptCall) -> None:
        raise KeyboardInterrupt

    def interrupt(self, call: KeptCall, interrupt: BaseException, *, again: bool) -> None:
        self.asked.append(again)
        if self._others is not None:
            call.session = self._others
        elif len(self.asked) == 2:
            call.settle(lambda: Ended(cast(Any, None), [], interrupt))
            call.tell()


def test_interrupts_of_a_call_that_moves_to_fresh_ranks() -> None:
    """Those are asked to end the call, first, whatever the lost ones were asked."""
    fresh = Ranks()
    lost = Ranks(fresh)
    nothing = cast(Any, None)
    call = KeptCall(nothing, Payload(), nothing, nothing, moves=True, freed=(), free_later=nothing)
    call.session = lost
    with pytest.raises(KeyboardInterrupt):
        call.drive().result()
    assert lost.asked == [False]
    assert fresh.asked == [False, True]
