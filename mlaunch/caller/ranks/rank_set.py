"""The ranks behind one ``Ranks``: its present session, the calls made for it, and what is noted between them."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from mlaunch.base.exceptions import RanksLost
from mlaunch.base.misuse import misuse
from mlaunch.caller import arguments, interrupts
from mlaunch.caller.launch.call import flush_streams
from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.output_plan import OutputPlan, output_plan, with_directory
from mlaunch.caller.ranks.kept_call import KeptCall, MergedOptions, RanksFuture, pickle_call
from mlaunch.caller.ranks.open_session import open_session
from mlaunch.caller.ranks.pickling_for import Destination
from mlaunch.caller.ranks.session import RanksLaunch
from mlaunch.caller.ranks.session_words import older_code
from mlaunch.caller.ranks.stay_rules import StayRules
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.caller.warn import warn_caller
from mlaunch.protocol import calls
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import Context, LaunchSpec

if TYPE_CHECKING:
    from mlaunch.core.load import CallerParts

_KEPT = 20  # reports
_sessions: weakref.WeakSet[RanksLaunch] = weakref.WeakSet()


class ClosedError(RuntimeError):
    """Somebody has closed the ranks."""


class RankSet:
    """Makes calls, each on the present session: the first, or a fresh one after that was lost."""

    def __init__(
        self, options: Options, *, restart: bool, idle_timeout: float | None, surroundings: Context | None = None
    ) -> None:
        self.options = options
        self.reports: deque[Callable[[], LaunchReport]] = deque(maxlen=_KEPT)
        self.closed = False
        self.told_stale: set[str] = set()
        self.outdated = False  # some code is older than its file
        self._rules = StayRules(idle_timeout, restart, carry_on=self._carry_on)
        self._opening = threading.RLock()
        self.pid = os.getpid()
        self._numbers = itertools.count(1)
        self._freed: deque[tuple[str, int]] = deque()
        self._merged = MergedOptions(options)
        self._known: tuple[tuple[RanksLaunch, Options, str], tuple[LaunchSpec, OutputPlan]] | None = None
        self.session = self._open(surroundings)

    def next_number(self) -> int:
        """Returns a number that no call and no held value of these ranks has."""
        return next(self._numbers)

    def submit(self, options: Options, call: Call, future: RanksFuture | None = None) -> RanksFuture:
        """Queues a call; of the options count those that are a call's own. ``future``: if there is one already."""
        session, made, future = None, None, RanksFuture() if future is None else future
        try:
            with interrupts.deferred():
                session, made = self._submit(options, call, future)
                session.leave_to_thread()
            return future
        except BaseException as interrupt:  # nobody will have the future
            if session is not None and made is not None:
                session.interrupt(made, interrupt)
            raise

    def run(self, options: Options, call: Call) -> tuple[str, Ended]:
        """Makes a call and drives it to its end; returns whose it was, too. An interrupt ends it, and is raised."""
        features = [feature for feature in options.features if not feature.waits]  # whose parts are of the ranks
        if not features:
            return self._run(options, call)
        from mlaunch.core.load import CallerParts  # which most calls do not need

        with CallerParts(options, features=features) as parts, parts.around():
            return self._run(options, call, parts)

    def _run(self, options: Options, call: Call, parts: CallerParts | None = None) -> tuple[str, Ended]:
        with interrupts.deferred():  # one for all of it: between the two nobody would end the call
            _, made = self._submit(options, call, None)
            if parts is not None:
                parts.attach(made.tell_part)
            ended = made.drive()
        self._note(ended.report, made.stale)
        return made.spec.launch_id, ended

    def _submit(self, options: Options, call: Call, future: RanksFuture | None) -> tuple[RanksLaunch, KeptCall]:
        self._check()
        if not isinstance(call.function, calls.Reference):
            arguments.check(call.function, call.args, call.kwargs)
        flush_streams()  # what was printed before the call stands before what the ranks print
        while True:
            session = self._present()
            made = self._make(session, options, call)
            made.attach(future)
            try:
                with self._opening:  # else what close() does not wait for would be cancelled by it
                    self._check()
                    session.submit(made)
                return session, made
            except RanksLost:  # meanwhile; what that means is decided above
                made.drop()
            except BaseException:
                made.drop()
                raise

    def note(self, future: Future[Any]) -> None:
        """Keeps the report of a call that is over, and warns of old code in the ranks."""
        if isinstance(future, RanksFuture) and future.make_report is not None:
            self._note(future.make_report, future.stale)

    def _note(self, report: Callable[[], LaunchReport], stale: str) -> None:
        self.reports.append(report)
        if not stale:
            return
        new = [one.partition("@")[0] for one in stale.split(",") if one not in self.told_stale]
        self.told_stale.update(stale.split(","))
        if new:
            self.outdated = True
            warn_caller(older_code(new, shared=self._rules.yields))

    def stay(self, seconds: float | None) -> None:
        """Sets the idle timeout, and lets other ranks end these while they are idle, to get their devices."""
        self._rules.yields = True
        was, self._rules.idle_timeout = self._rules.idle_timeout, seconds
        if was != seconds:
            self.session.leave_to_thread()  # which waits for as long as it was before

    def when_over(self, forget: Callable[[], None]) -> None:
        """Closes the ranks once they have ended and nobody has to hear of that, and calls ``forget`` then.

        A call that comes meanwhile raises ClosedError, or starts fresh ranks before. ``forget`` must not hold the
        ranks: what ends them with their last user holds this.
        """

        def close(session: RanksLaunch) -> None:
            # The lock of opening may be held for seconds; whoever opens a session asks again under it.
            if self.session is session:
                self.closed = True
                forget()

        self._rules.forget = close

    def free_later(self, owner: str, number: int) -> None:
        """Lets the next call free a held object; called in any thread."""
        self._freed.append((owner, number))

    def close(self, *, wait: bool, cancel: bool = False) -> None:
        """Ends the ranks; there are no calls after it. ``cancel``: those that have not begun."""
        if self.pid != os.getpid():
            return
        with self._opening:
            self.closed = True
        with interrupts.deferred():
            if cancel:
                self.session.cancel_queued()
            self.session.close(wait=wait)

    def abandon(self) -> None:
        """Lets the ranks end after what was submitted; the collector may call it anywhere."""
        self.closed = True
        self.session.abandon()

    def _make(self, session: RanksLaunch, options: Options, call: Call) -> KeptCall:
        name = call.name or f"{getattr(call.function, '__qualname__', type(call.function).__qualname__)}()"
        options = with_directory(self._merged.with_those_of(options), name)
        spec, plan = self._planned(session, options, name)
        freed = self._take_freed(session.launch_id)
        to = Destination(session.launch_id, f"{name} on {spec.world_size} ranks", spec.world_size)
        sent = Call(calls.portable(call.function), call.args, call.kwargs, freed, call.held, call.seed)
        try:
            content = pickle_call(to, name, sent)
        except BaseException:
            self._freed.extend((session.launch_id, number) for number in freed)
            raise
        return KeptCall(spec, content, plan, options, not to.used, freed, self.free_later)

    def _planned(self, session: RanksLaunch, options: Options, name: str) -> tuple[LaunchSpec, OutputPlan]:
        """Returns what a call has of its own; that of the last call, if nothing differs."""
        known = (session, options, name)
        if self._known is not None and self._known[0] == known:
            return self._known[1]
        spec = session.handle.idle_spec.called(name=name, deadline=options.deadline)
        found = spec, session.handle.adapt_output(output_plan(options, spec))
        self._known = (known, found) if found[1].directory is None and found[1].area is None else None
        return found

    def _open(self, surroundings: Context | None) -> RanksLaunch:
        session = open_session(self.options, self._rules, surroundings)
        _sessions.add(session)
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # to be called before an engine gives its machines back
        return session

    def _check(self) -> None:
        """Refuses what is no use: to a fork, first, where some thread of the parent may hold a lock for ever."""
        if self.pid != os.getpid():
            raise misuse(RuntimeError(f"these ranks belong to process {self.pid}, of which this one is a fork"))
        if self.closed:
            raise misuse(ClosedError("these ranks were closed; make new ones: Ranks(...)"))
        if sys.is_finalizing():
            raise misuse(RuntimeError("the interpreter is ending, and has ended its ranks; call them before that"))

    def _present(self) -> RanksLaunch:
        """Returns the present session; a fresh one, if that is over.

        Meanwhile no lock is held but that of opening: whoever ends a session runs callbacks, which may submit.
        """
        while True:
            self._check()
            session = self.session
            if not session.whole():
                session.step()
                session.tell()
            if not session.over:
                return session
            session.see_end()
            if not self._rules.restart and not session.expired:
                raise misuse(RanksLost(f"the ranks are gone: {session.why_lost}; make new ones (restart=True does)"))
            self._check()  # it may have been closed meanwhile
            self._warn_of(session)
            refused: list[tuple[KeptCall, RanksLost]] = []
            with self._opening:
                if self.session is session and not self.closed:
                    self.session = self._open(session.handle.idle_spec.context)  # of when they were made
                    refused = self._move(session)
            for call, error in refused:
                call.refuse(session.report, session.why_lost, error)

    def _warn_of(self, session: RanksLaunch) -> None:
        if why := session.take_loss():
            warn_caller(f"the ranks were lost between calls: {why}; fresh ones are started")

    def _move(self, lost: RanksLaunch) -> list[tuple[KeptCall, RanksLost]]:
        """Gives the present session, before all others, what lost ranks have left; returns what it refuses."""
        refused = []
        while (call := lost.take_left()) is not None:
            call.spec, call.plan = self._planned(self.session, call.options, call.name)
            call.attach(call.future)
            try:
                self.session.submit(call)
            except RanksLost as error:  # these, too
                refused.append((call, error))
        self.session.leave_to_thread()
        return refused

    def _carry_on(self, lost: RanksLaunch) -> None:
        """Starts the ranks that run what lost ones have left, if nobody has yet."""
        try:
            self._present()
        except BaseException as error:
            while (call := lost.take_left()) is not None:
                call.refuse(lost.report, lost.why_lost, error)
            if not isinstance(error, Exception):  # Ctrl-C, while they are started
                raise

    def _take_freed(self, owner: str) -> tuple[int, ...]:
        found = []
        with contextlib.suppress(IndexError):  # handles are collected in any thread
            while True:
                found.append(self._freed.popleft())
        return tuple(number for of, number in found if of == owner)


def _close_all() -> None:
    for session in list(_sessions):
        session.close(wait=False)
