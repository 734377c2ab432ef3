"""The ranks behind one ``Ranks``: its present launch, the calls made for it, and the notes between them."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

from mlaunch.base.exceptions import RanksLost, misuse
from mlaunch.base.log import log
from mlaunch.caller import checks, interrupts
from mlaunch.caller.launch.call import flush_streams, planned, server_for
from mlaunch.caller.launch.plan import Attempt, ThisMachine
from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.launch.start import send_launch, with_pipes
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.console import StartingLine
from mlaunch.caller.output.output_plan import OutputPlan, output_plan, place_of, with_directory
from mlaunch.caller.output.relay import Relay
from mlaunch.caller.report.launch_report import History, LaunchReport
from mlaunch.caller.report.user_frames import warn_caller
from mlaunch.caller.warm_server import warm_server
from mlaunch.core.records import Grant
from mlaunch.protocol import calls
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import Context, LaunchSpec
from mlaunch.ranks.caller.kept_call import KeptCall, MergedOptions, RanksFuture, pickle_call
from mlaunch.ranks.caller.kept_handle import KeptHandle
from mlaunch.ranks.caller.ranks_launch import RanksLaunch, StayRules

if TYPE_CHECKING:
    from mlaunch.core.load import CallerParts

_KEPT = 20  # reports
_INSTEAD = {
    "max_restarts": "it starts new ranks when they are lost; see restart=",
    "max_preemptions": "the next call starts new ranks",
    "keep": "see idle_timeout=",
    "inline": "its ranks are processes",
    "debug": "a decorated function does, for a call on ranks of its own",
    "ranks": "it makes them",
}
_launches: weakref.WeakSet[RanksLaunch] = weakref.WeakSet()


class ClosedError(RuntimeError):
    """The error of a call on ranks that were closed."""


class RankSet:
    """The state that outlives each launch of its ranks.

    A call goes to the present launch, or to a new one if that is lost.
    """

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
        self.launch = self._open(surroundings)

    def next_number(self) -> int:
        """Return a number that no call and no held value of these ranks has."""
        return next(self._numbers)

    def submit(self, options: Options, call: Call, future: RanksFuture | None = None) -> RanksFuture:
        """Queue a call; only those of the options count that belong to a call. ``future``: if it exists already."""
        launch, made, future = None, None, RanksFuture() if future is None else future
        try:
            with interrupts.deferred():
                launch, made = self._submit(options, call, future)
                launch.leave_to_thread()
            return future
        except BaseException as interrupt:  # no caller will have the future
            if launch is not None and made is not None:
                launch.interrupt(made, interrupt)
            raise

    def run(self, options: Options, call: Call) -> tuple[str, Ended]:
        """Make a call and drive it to its end; return its launch's ID, too. An interrupt ends it, and is raised."""
        # Features that wait for resources have parts only in the ranks' launch.
        features = options.features and [one for one in options.features if "caller.acquire" not in one.hooks]
        if not features:
            return self._run(options, call)
        from mlaunch.core.load import CallerParts  # most calls do not need it

        with CallerParts(options, features=features) as parts, parts.around():
            return self._run(options, call, parts)

    def _run(self, options: Options, call: Call, parts: CallerParts | None = None) -> tuple[str, Ended]:
        with interrupts.deferred():  # one for both steps: an interrupt between them would leave the call running
            _, made = self._submit(options, call, None)
            if parts is not None:
                parts.attach(made.tell_part)
            ended = made.drive()
        self._note(ended.report, made.stale)
        return made.spec.launch_id, ended

    def _submit(self, options: Options, call: Call, future: RanksFuture | None) -> tuple[RanksLaunch, KeptCall]:
        self._check()
        if not isinstance(call.function, calls.Reference):
            checks.check_arguments(call.function, call.args, call.kwargs)
        flush_streams()  # what was printed before the call comes before what the ranks print
        while True:
            launch = self._present()
            made = self._make(launch, options, call)
            if future is not None:
                made.attach(future)
            try:
                with self._opening:  # otherwise close() would cancel the calls that it does not wait for
                    if self.closed:
                        self._check()
                    launch.submit(made)
                return launch, made
            except RanksLost:  # lost meanwhile; the next turn decides what that means
                made.drop()
            except BaseException:
                made.drop()
                raise

    def ask_idle(self, call: Call, patience: float) -> list[Any] | None:
        """Make a call without a report or output, if the ranks have nothing else to do; return its values.

        None if the ranks are busy, or gone, or have not answered after ``patience`` seconds. Then the call continues,
        and others wait for it: ending it might end ranks that are only slow, with what they hold.
        """
        launch = self.launch
        if self.closed or self.pid != os.getpid() or launch.over or not launch.idle or not launch.whole():
            return None
        with interrupts.deferred():
            future = self._submit_question(launch, call)
        if future is None:
            return None
        try:
            return list(future.result(patience))
        except Exception:  # usually the time is over, or the ranks are gone, which the next call reports
            log.debug("%s: no answer", call.name, exc_info=True)
            return None

    def _submit_question(self, launch: RanksLaunch, call: Call) -> RanksFuture | None:
        """Begin the call at once, or not at all."""
        spec, portable = launch.handle.idle_spec.called(name=call.name), calls.portable(call.function)
        sent = Call(portable, call.args, call.kwargs)
        content, _ = pickle_call(launch.launch_id, call.name, call.name, spec.world_size, sent)
        future = RanksFuture()
        made = KeptCall(spec, content, launch.handle.idle_plan, self.options, False, (), self.free_later)
        made.unheard = True
        made.attach(future)
        try:
            launch.submit(made)
        except RanksLost:
            made.drop()
            return None
        if not future.running() and not future.done():  # the call of another thread has come first
            launch.interrupt(made, CancelledError())
            return None
        launch.leave_to_thread()
        return future

    def note(self, future: Future[Any]) -> None:
        """Keep the report of a call that is over, and warn of old code in the ranks."""
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
            warn_caller(_older_code(new, shared=self._rules.yields))

    def stay(self, seconds: float | None) -> None:
        """Set the idle timeout; from now on other ranks may end these while they are idle, to get their devices."""
        self._rules.yields = True
        was, self._rules.idle_timeout = self._rules.idle_timeout, seconds
        if was != seconds:
            self.launch.leave_to_thread()  # the thread still waits for as long as before

    def when_over(self, forget: Callable[[], None]) -> None:
        """Close the ranks once they have ended and nobody has to learn of that, and then call ``forget``.

        A call that comes meanwhile raises ClosedError, or starts new ranks before. ``forget`` must not refer to the
        ranks, which end with their last user: this object refers to it.
        """

        def close(launch: RanksLaunch) -> None:
            # The lock of opening may be held for seconds; a thread that opens a launch checks again under it.
            if self.launch is launch:
                self.closed = True
                forget()

        self._rules.forget = close

    def free_later(self, owner: str, number: int) -> None:
        """Free a held object with the next call; for any thread."""
        self._freed.append((owner, number))

    def close(self, *, wait: bool, cancel: bool = False) -> None:
        """End the ranks; no calls are possible afterwards. ``cancel``: cancel the calls that have not begun."""
        if self.pid != os.getpid():
            return
        with self._opening:
            self.closed = True
        with interrupts.deferred():
            if cancel:
                self.launch.cancel_queued()
            self.launch.close(wait=wait)

    def abandon(self) -> None:
        """Make the ranks end after the submitted calls; the collector may call it anywhere."""
        self.closed = True
        self.launch.abandon()

    def _make(self, launch: RanksLaunch, options: Options, call: Call) -> KeptCall:
        name = call.name or f"{getattr(call.function, '__qualname__', type(call.function).__qualname__)}()"
        if options is not self.options:
            options = self._merged.with_those_of(options)
        if options.log_dir is not None:
            options = with_directory(options, name)
        spec, plan = self._planned(launch, options, name)
        freed = self._take_freed(launch.launch_id) if self._freed else ()
        sent = Call(calls.portable(call.function), call.args, call.kwargs, freed, call.held, call.seed)
        size = spec.world_size
        try:
            content, moves = pickle_call(launch.launch_id, name, f"{name} on {size} ranks", size, sent)
        except BaseException:
            self._freed.extend((launch.launch_id, number) for number in freed)
            raise
        return KeptCall(spec, content, plan, options, moves, freed, self.free_later)

    def _planned(self, launch: RanksLaunch, options: Options, name: str) -> tuple[LaunchSpec, OutputPlan]:
        """Return the spec and output plan of a call; those of the last call, if nothing differs."""
        known = (launch, options, name)
        if self._known is not None and self._known[0] == known:
            return self._known[1]
        spec = launch.handle.idle_spec.called(name=name, deadline=options.deadline)
        found = spec, launch.handle.adapt_output(output_plan(options, spec))
        self._known = (known, found) if found[1].directory is None and found[1].area is None else None
        return found

    def _open(self, surroundings: Context | None) -> RanksLaunch:
        launch = start_ranks(self.options, self._rules, surroundings)
        _launches.add(launch)
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # to be called before an engine gives its machines back
        return launch

    def _check(self) -> None:
        """Refuse ranks that cannot be used. A fork first: a thread of the parent may have held a lock, now for ever."""
        if self.pid != os.getpid():
            raise misuse(RuntimeError(f"these ranks belong to process {self.pid}; this process is a fork of it"))
        if self.closed:
            raise misuse(ClosedError("these ranks were closed; make new ones: Ranks(...)"))
        if sys.is_finalizing():
            raise misuse(RuntimeError("the interpreter is ending, and has ended its ranks; call them before that"))

    def _present(self) -> RanksLaunch:
        """Return the present launch; a new one, if that is over.

        Meanwhile only the lock of opening is held: ending a launch runs callbacks, which may submit.
        """
        while True:
            launch = self.launch
            if not launch.whole():
                launch.step()
                launch.tell()
            if not launch.over:
                return launch
            self._check()
            launch.see_end()
            if not self._rules.restart and not launch.expired:
                raise misuse(RanksLost(f"the ranks are gone: {launch.why_lost}; make new ones (restart=True does)"))
            self._check()  # it may have been closed meanwhile
            self._warn_of(launch)
            refused: list[tuple[KeptCall, RanksLost]] = []
            with self._opening:
                if self.launch is launch and not self.closed:
                    self.launch = self._open(launch.handle.idle_spec.context)  # of the time when they were made
                    refused = self._move(launch)
            for call, error in refused:
                call.refuse(launch.report, launch.why_lost, error)

    def _warn_of(self, launch: RanksLaunch) -> None:
        if why := launch.take_loss():
            warn_caller(f"the ranks were lost between calls: {why}; fresh ones are started")

    def _move(self, lost: RanksLaunch) -> list[tuple[KeptCall, RanksLost]]:
        """Give the present launch, before all others, the calls that lost ranks have left; return those it refuses."""
        refused = []
        while (call := lost.take_left()) is not None:
            call.spec, call.plan = self._planned(self.launch, call.options, call.name)
            call.attach(call.future)
            try:
                self.launch.submit(call)
            except RanksLost as error:  # the new ranks are lost, too
                refused.append((call, error))
        self.launch.leave_to_thread()
        return refused

    def _carry_on(self, lost: RanksLaunch) -> None:
        """Start ranks for the calls that lost ones have left, if no other thread has yet."""
        try:
            self._present()
        except BaseException as error:
            while (call := lost.take_left()) is not None:
                call.refuse(lost.report, lost.why_lost, error)
            if not isinstance(error, Exception):  # Ctrl-C, while they start
                raise

    def _take_freed(self, owner: str) -> tuple[int, ...]:
        found = []
        with contextlib.suppress(IndexError):  # other threads take some, too
            while True:
                found.append(self._freed.popleft())
        return tuple(number for of, number in found if of == owner)


def _close_all() -> None:
    for launch in list(_launches):
        launch.close(wait=False)


def _older_code(names: Sequence[str], *, shared: bool) -> str:
    """Return the sentence on changed modules. ``shared``: the ranks are those of ``keep=``, which nobody can reload."""
    next_step = "new ranks, which have it, run the next call" if shared else "ranks.reload() loads it"
    return (
        f"the ranks run older code than the files of {', '.join(names)} hold, since they imported it before the "
        f"change; {next_step}"
    )


def start_ranks(options: Options, rules: StayRules, surroundings: Context | None = None) -> RanksLaunch:
    """Start ranks with these options; do not wait for them. ``surroundings``: None for those of this moment."""
    _check(options)
    if options.engine is not None:
        launch: RanksLaunch = options.engine.open_session(options, rules)
        return launch
    with interrupts.deferred():
        history = History()
        environ = surroundings.environ if surroundings is not None else {**os.environ, **(options.env or {})}
        server = server_for(options, Call(int, (), {}), environ)
        owned = options.start_method != "forkserver"
        try:
            place = place_of(options)
            with StartingLine("Ranks", place) as line:
                machine = ThisMachine(server.ready(None, line.show), server.count_devices)
            spec = planned(Grant(options, environ), machine, "Ranks", Attempt(0, None))
            spec = dataclasses.replace(spec.called(name=f"Ranks ({spec.world_size})", deadline=None), stays=True)
            spec = dataclasses.replace(spec, context=surroundings or spec.context)
            history.ready = time.monotonic()
            plan = output_plan(options.replaced({"log_dir": None}), spec, place)
            spec = with_pipes(spec, plan)
            agent = send_launch(server, spec, None)
            handle = KeptHandle(spec, server, agent, Relay(plan, spec.local_world_size, 0), history)
        except BaseException:
            if owned:
                server.close()
            raise
        return RanksLaunch(handle, rules, own_server=owned)


def check_ranks(options: Options) -> None:
    """Raise what ``start_ranks`` would, for options with which no ranks can be started here; start none.

    An engine checks its own options, when it asks for machines.
    """
    _check(options)
    if options.engine is not None:
        return
    with interrupts.deferred():
        environ = {**os.environ, **(options.env or {})}
        server = warm_server.get(environ)  # whatever the start method, this machine has the same devices
        machine = ThisMachine(server.ready(None, lambda: None), server.count_devices)
        planned(Grant(options, environ), machine, "Ranks", Attempt(0, None))


def _check(options: Options) -> None:
    """Refuse options that ranks that stay do not support."""
    rank = checks.rank_of_process() if options.join else ""
    if rank:
        raise misuse(
            RuntimeError(
                f"Ranks() is called in {rank}; to start ranks of its own there, give join=False. Otherwise make "
                f"them in the process that starts the others"
            )
        )
    wrong = [f"{name} ({instead})" for name, instead in _INSTEAD.items() if getattr(options, name)]
    wrong += [f"{one.options[0]} ({one.one_call})" for one in options.features if one.one_call]
    if wrong:
        raise misuse(ValueError(f"Ranks does not take {', '.join(wrong)}"))
    size = len(options.devices) if options.devices is not None else options.n_gpus
    if options.rank_start > 0 or (options.world_size is not None and options.world_size != (size or 1)):
        raise misuse(
            ValueError(
                f"world_size={options.world_size}, rank_start={options.rank_start}: ranks that stay are called by "
                f"one process, which starts them; allowed: world_size=None, rank_start=0. For several machines give "
                f"engine="
            )
        )
