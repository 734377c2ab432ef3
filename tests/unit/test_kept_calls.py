"""A call on ranks that stay, as its caller waits for it."""

from __future__ import annotations

import select
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlaunch.caller.launch.settle import Ended
from mlaunch.protocol.payload import Payload
from mlaunch.ranks.caller.kept_call import KeptCall
from mlaunch.ranks.caller.ranks_launch import RanksLaunch, StayRules


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
            call.launch = self._others
        elif len(self.asked) == 2:
            call.settle(lambda: Ended(cast(Any, None), [], interrupt))
            call.tell()


def test_interrupts_of_a_call_that_moves_to_fresh_ranks() -> None:
    """Those are asked to end the call, first, whatever the lost ones were asked."""
    fresh = Ranks()
    lost = Ranks(fresh)
    nothing = cast(Any, None)
    call = KeptCall(nothing, Payload(), nothing, nothing, moves=True, freed=(), free_later=nothing)
    call.launch = lost
    with pytest.raises(KeyboardInterrupt):
        call.drive().result()
    assert lost.asked == [False]
    assert fresh.asked == [False, True]


class Handle:
    """What ranks have sent: the values of each call at once."""

    ahead, over, ending = True, True, False

    def __init__(self) -> None:
        self.spec = SimpleNamespace(launch_id="some")
        self.heard = 0
        self.relay = self
        self._poll = select.epoll()

    def watch(self, fd: int) -> Callable[[], bool]:
        self._poll.register(fd, select.EPOLLIN)
        return lambda: True

    def fileno(self) -> int:
        return self._poll.fileno()

    def timeout(self) -> None:
        """Is never due."""

    def report(self) -> None:
        """Reports nothing."""

    def begin(self, call: KeptCall) -> None:
        """Sends nothing."""

    def wait_ahead(self) -> list[tuple[int, int]]:
        self.heard += 1
        return []

    def hear_ahead(self, _: list[tuple[int, int]]) -> bool:
        return True

    def finish(self) -> tuple[Callable[[], Ended], str]:
        return lambda: Ended(cast(Any, None), [], None), ""


def test_a_thread_that_has_heard_one_call_does_not_wait_for_the_next_before_it_drives_again() -> None:
    """It is told first, by code that may have others drive: what these take in wakes nobody else."""
    handle, nothing = Handle(), cast(Any, None)
    session = RanksLaunch(cast(Any, handle), StayRules(), own_server=False)
    calls = [KeptCall(nothing, Payload(), nothing, nothing, True, (), nothing) for _ in range(2)]
    for call in calls:
        session.submit(call)
    session.hear_values(calls[1])
    assert (handle.heard, session.present) == (1, calls[1])
    assert not calls[0].over
    session.ended.set()
    session._driver.end()
    session._driver.join()
    handle._poll.close()
