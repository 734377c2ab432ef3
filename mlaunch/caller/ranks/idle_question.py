"""Asks ranks that stay for something small, if they have nothing else to do: never in the way of a call."""

from __future__ import annotations

import concurrent.futures
import os
from typing import Any

from mlaunch.base.exceptions import RanksLost
from mlaunch.base.log import log
from mlaunch.caller import interrupts
from mlaunch.caller.ranks.kept_call import KeptCall, RanksFuture, pickle_call
from mlaunch.caller.ranks.pickling_for import Destination
from mlaunch.caller.ranks.rank_set import RankSet
from mlaunch.caller.ranks.session import RanksLaunch
from mlaunch.protocol import calls
from mlaunch.protocol.calls import Call


def ask_idle(ranks: RankSet, call: Call, patience: float) -> list[Any] | None:
    """Makes a call of which nothing is reported or shown; returns its values.

    None: the ranks are busy, or gone, or have not answered after ``patience`` seconds. Then the call goes on, and
    others wait for it: to end it might end ranks that are only slow, with what they hold.
    """
    session = ranks.session
    if ranks.closed or ranks.pid != os.getpid() or session.over or not session.idle or not session.whole():
        return None
    with interrupts.deferred():
        future = _submit(ranks, session, call)
    if future is None:
        return None
    try:
        return list(future.result(patience))
    except Exception:  # mostly that the time is over, or the ranks are: the next call tells that
        log.debug("%s: no answer", call.name, exc_info=True)
        return None


def _submit(ranks: RankSet, session: RanksLaunch, call: Call) -> RanksFuture | None:
    """Begins the call at once, or not at all."""
    spec = session.handle.idle_spec.called(name=call.name)
    to = Destination(session.launch_id, call.name, spec.world_size)
    content = pickle_call(to, call.name, Call(calls.portable(call.function), call.args, call.kwargs))
    future = RanksFuture()
    made = KeptCall(spec, content, session.handle.idle_plan, ranks.options, False, (), ranks.free_later)
    made.unheard = True
    made.attach(future)
    try:
        session.submit(made)
    except RanksLost:
        made.drop()
        return None
    if not future.running() and not future.done():  # another thread's has come first
        session.interrupt(made, concurrent.futures.CancelledError())
        return None
    session.leave_to_thread()
    return future
