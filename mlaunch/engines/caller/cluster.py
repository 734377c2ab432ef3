"""Machines that an engine holds for many calls."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from mlaunch.base.exceptions import LaunchError
from mlaunch.base.fds import renewed
from mlaunch.base.misuse import misuse
from mlaunch.caller.launch.call import TRIES
from mlaunch.caller.launch.plan import Attempt
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.output_plan import OutputPlan
from mlaunch.core.grants import Need
from mlaunch.engines.caller.launch.engine_call import call_on_machines
from mlaunch.engines.caller.launch.engine_launch import MachinesLaunch, StartedLaunch, Work, with_hosts
from mlaunch.engines.caller.launch.kept_launch import open_on_machines
from mlaunch.engines.caller.launch.machine import Machine
from mlaunch.engines.caller.launch.machines import Machines, PlacedMachines, say
from mlaunch.engines.caller.machine_queue import MachineClaim, MachineQueue
from mlaunch.protocol import calls
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import LaunchSpec

if TYPE_CHECKING:
    from mlaunch.caller.launch.settle import Ended, Steps
    from mlaunch.caller.ranks.ranks_launch import RanksLaunch, StayRules
    from mlaunch.sweeps.caller.run_future import RunCourse

T = TypeVar("T")


class Cluster:
    """What ``hold`` returns: as ``engine=``, it runs a call there. Several threads may call, one after the other;
    the calls of ``submit``, ``map`` and ``grid`` run on machines that no other one has.

    Use it in a ``with`` statement, or ``close()`` it. A machine that is lost ends the call that runs; the next one
    asks the engine for others. Ranks that stay take the machines until they end, those of ``keep=`` only while they
    are called.
    """

    def __init__(self, machines: Machines, idle_timeout: float | None) -> None:
        self._machines = machines
        self._size = len(machines.hosts)
        self._idle_timeout = idle_timeout
        self._timer: threading.Timer | None = None
        self._used_at = time.monotonic()
        self._queue = MachineQueue(machines)
        self._sessions: list[tuple[list[Machine], RanksLaunch]] = []  # of ranks that stay, with their machines
        self._parts: dict[tuple[Machine, ...], HeldPart] = {}
        self._lock = renewed(threading.Lock())
        self._pid = os.getpid()  # whose machines they are: in a fork, another thread's lock would stay locked
        self._start_timer()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An exception leaves the block, Ctrl-C among them: to wait for calls of other threads would hold it up.
        if kind is not None:
            self._queue.close("its block was left with an exception")
            self._queue.end_all()
        self.close()

    @property
    def hosts(self) -> list[str]:
        """The names of its machines, in the order of their ranks; [] once they were given back."""
        return self._machines.hosts

    def call(
        self, options: Options, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Ended:
        """Run a function on these machines; see ``call_on_machines``."""
        with self._taken(options):
            return call_on_machines(self._machines, options, function, args, kwargs)

    def open_session(self, options: Options, rules: StayRules) -> RanksLaunch:
        """Start ranks that stay on these machines."""
        with self._taken(options):
            return self.opened(self._machines, options, rules)

    def check_trial(self, machines: int | None) -> None:
        """Raise what keeps a launch of several from having so many machines: ValueError."""
        if machines is not None and machines > self._size:
            raise misuse(ValueError(f"machines={machines} on {self._size} held machines: allowed: 1 to {self._size}"))

    def attempt(self, options: Options, call: Call, name: str, number: Attempt, course: RunCourse) -> Steps:
        """Make one attempt of a submitted call, on machines that no other one has.

        If machines turn out to be lost before anything has run there, others are taken.
        """
        left = TRIES
        while True:
            left -= 1
            self._check_process()
            claim = self._queue.join(MachineClaim(options.machines or self._size, course.notify, course.ask_to_cancel))
            try:
                course.starting = False
                while not self._queue.take(claim):
                    yield Need(f"{name} waits for machines")
                course.starting = True
                course.begins()
                part = yield from _elsewhere(functools.partial(self._part, claim), course)
                return (yield from part.attempt(options, call, name, number, course))
            except LaunchError:
                if not claim.lost or not left:
                    raise
            finally:
                self._leave_claim(claim)

    def _part(self, claim: MachineClaim) -> HeldPart:
        """Return the machines of a claim. Waits, if too few are left, until the engine has given others."""
        if claim.whole:
            self._machines.open(Options().join_timeout, lambda state: say(f"a launch waits: {state}"))
            self._queue.narrow(claim)
        with self._lock:
            self._parts = {there: part for there, part in self._parts.items() if not any(one.lost for one in there)}
            # The same object for the same machines: keep= finds its ranks by the engine.
            return self._parts.setdefault(tuple(claim.machines), HeldPart(self, self._machines, claim.machines))

    def make_room(self, machines: Sequence[Machine]) -> None:
        """End ranks on some of these machines that stay for as long as nobody else wants those."""
        with self._lock:
            self._sessions = [one for one in self._sessions if not one[1].over]
            found = [session for there, session in self._sessions if not set(there).isdisjoint(machines)]
        for session in found:
            if not session.rules.yields:
                who = session.handle.idle_spec.call.name
                raise misuse(LaunchError(
                    f"these machines are in use by {who}, which stay until they are closed: call them, or close() them "
                    f"before others run here"
                ))  # fmt: skip
            _end(session)

    def opened(self, machines: PlacedMachines, options: Options, rules: StayRules) -> RanksLaunch:
        """Start ranks that stay on machines that the caller has claimed."""
        session = open_on_machines(machines, options, rules, self._note_use)
        with self._lock:
            self._sessions.append((list(machines.machines), session))
        return session

    @contextlib.contextmanager
    def _taken(self, options: Options) -> Iterator[None]:
        """Give the machines to one who may have them all."""
        self._check_process()
        if options.machines not in {None, self._size} and not self._queue.closed:
            raise misuse(ValueError(f"machines={options.machines} on {self._size} held machines: allowed: "
                                    f"{self._size}, or None"))  # fmt: skip
        claim = self._queue.join(MachineClaim(None))
        try:
            self._queue.wait(claim)
            self.make_room(self._machines.machines)
            yield
        finally:
            self._leave_claim(claim)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise LaunchError(
                f"these machines belong to process {self._pid}, of which this one (pid {os.getpid()}) is a fork: "
                f"hold() others here"
            )

    def _leave_claim(self, claim: MachineClaim) -> None:
        self._note_use()
        self._queue.leave(claim)

    def _note_use(self) -> None:
        self._used_at = time.monotonic()

    def close(self) -> None:
        """Give the machines back, once calls that run are over, and end ranks there. May be called again.

        Does nothing in a fork of the process that holds them.
        """
        if os.getpid() == self._pid:
            self._queue.close("close() was called")
            self._leave()

    def _leave(self) -> None:
        # In line behind the calls that wait already: these were promised the machines.
        claim = self._queue.join(MachineClaim(None, ends=True))
        try:
            self._queue.wait(claim)
            self._stop_timer()
            for _, session in self._sessions:
                _end(session)
            self._machines.close()
        finally:
            self._queue.leave(claim)

    def _leave_if_unused(self) -> None:
        with self._lock:
            if self._timer is not threading.current_thread():  # close() was called
                return
            # Ranks that stay count as use: they would be lost without anybody's having asked for that.
            in_use = self._queue.in_use or any(not session.over for _, session in self._sessions)
            if in_use or self._left() > 0:
                self._start_timer(again=in_use)
                return
            self._queue.close(f"no call came for {self._idle_timeout:g} s")
        self._leave()

    def _left(self) -> float:
        """Return the seconds until nobody has used them for too long."""
        return self._used_at + (self._idle_timeout or 0.0) - time.monotonic()

    def _start_timer(self, *, again: bool = False) -> None:
        if self._idle_timeout is not None and not self._queue.closed:
            self._timer = threading.Timer(
                self._idle_timeout if again else max(0.0, self._left()), self._leave_if_unused
            )
            # A daemon: the interpreter's end gives the machines back, and must not wait for the timer.
            self._timer.daemon = True
            self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def __repr__(self) -> str:
        return f"<{len(self.hosts)} machines: {', '.join(self.hosts)}>" if self.hosts else "<no machines any more>"


class HeldPart(PlacedMachines):
    """Machines of one launch at a time, which has claimed them. For ``engine=`` and ``keep=`` an engine of its own."""

    def __init__(self, holder: Cluster, whole: Machines, machines: Sequence[Machine]) -> None:
        super().__init__(whole.n_gpus, whole.heartbeat_timeout)
        self._holder = holder
        self.placement = whole.placement
        self.machines = list(machines)

    def attempt(self, options: Options, call: Call, name: str, number: Attempt, course: RunCourse) -> Steps:
        """Make one attempt of a submitted call here."""
        from mlaunch.sweeps.caller.submitted_call import follows, on_kept, output_of  # whose calls alone come here

        if options.keep is not None:
            own = {"engine": self, "machines": None, "deadline": number.time_left}
            return (yield from on_kept(options.replaced(own), call, course))

        def plan(spec: LaunchSpec, hosts: dict[int, str]) -> OutputPlan:
            return with_hosts(output_of(options, spec, course), hosts)

        sent, around = Call(calls.portable(call.function), call.args, call.kwargs), course.surroundings
        work = Work(name, sent)
        if around is not None:
            work = dataclasses.replace(work, argv=around.argv, path=around.sys_path, surroundings=around)

        def start() -> StartedLaunch:
            # Ranks of keep= stay there between trials, and would share the devices.
            self._holder.make_room(self.machines)
            return MachinesLaunch(self, options, work, plan, number).start_it()

        started = yield from _elsewhere(start, course)
        try:
            try:
                with follows(course, started.handle):
                    ended = yield from started.handle.drive()
            finally:
                started.handle.close()
        except BaseException:
            started.close()
            raise
        yield from _elsewhere(started.close, course)
        return ended

    def call(
        self, options: Options, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Ended:
        """Run a function on these machines; see ``call_on_machines``."""
        return call_on_machines(self, options, function, args, kwargs)

    def open_session(self, options: Options, rules: StayRules) -> RanksLaunch:
        """Start ranks that stay on these machines."""
        self._holder.make_room(self.machines)
        return self._holder.opened(self, options, rules)

    def __repr__(self) -> str:
        return f"<machines of an allocation: {', '.join(self.hosts)}>"


def _elsewhere(work: Callable[[], T], course: RunCourse) -> Generator[Need, None, T]:
    """Wait for what a thread of the call's own does: the one that drives all launches must not block for seconds."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        course.notify()

    # A thread for each, and no pool: in a pool, work that hangs on one machine would hold up that of all others.
    threading.Thread(target=run, daemon=True).start()
    while not future.done():
        yield Need(firm=True)
    return future.result()


def _end(session: RanksLaunch) -> None:
    """End ranks that stay, after their calls. They are not lost: a call on them says what has become of them."""
    session.close(wait=True, evicted=True)
