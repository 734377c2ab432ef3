"""Machines that an engine holds for many calls, and the queue for them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from mlaunch.base.exceptions import LaunchError, misuse
from mlaunch.base.fds import renewed
from mlaunch.caller import interrupts
from mlaunch.caller.launch.call import TRIES
from mlaunch.caller.launch.plan import Attempt
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.output_plan import OutputPlan
from mlaunch.core.records import Need
from mlaunch.engines.caller.engine_launch import (
    AllServers,
    MachinesLaunch,
    Work,
    call_on_machines,
    with_hosts,
)
from mlaunch.engines.caller.kept_launch import open_on_machines
from mlaunch.engines.caller.machines import Machine, Machines, PlacedMachines, say
from mlaunch.protocol import calls
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import LaunchSpec

if TYPE_CHECKING:
    from mlaunch.caller.launch.handle import LaunchHandle
    from mlaunch.caller.launch.settle import Ended, Steps
    from mlaunch.ranks.caller.ranks_launch import RanksLaunch, StayRules
    from mlaunch.sweeps.caller.run_future import RunStatus


T = TypeVar("T")


class Cluster:
    """Machines that ``hold`` has taken: as ``engine=``, they run calls.

    Several threads may call; their calls run one after the other. Each call of ``submit``, ``map`` and ``grid`` has
    machines of its own.

    Use it in a ``with`` statement, or ``close()`` it. If a machine is lost, the call that runs there ends; the next
    call asks the engine for other machines. Ranks that stay occupy the machines until they end, ranks of ``keep=``
    only while they are called.
    """

    def __init__(self, machines: Machines, idle_timeout: float | None) -> None:
        self._machines = machines
        self._size = len(machines.hosts)
        self._idle_timeout = idle_timeout
        self._timer: threading.Timer | None = None
        self._used_at = time.monotonic()
        self._queue = MachineQueue(machines)
        self._sessions: list[tuple[list[Machine], RanksLaunch]] = []  # ranks that stay, with their machines
        self._parts: dict[tuple[Machine, ...], HeldPart] = {}
        self._lock = renewed(threading.Lock())
        self._pid = os.getpid()  # the owner: in a fork, a lock that another thread held would stay locked
        self._start_timer()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Do not delay an exception, which may be Ctrl-C, by waiting for other threads' calls.
        if kind is not None:
            self._queue.close("its block was left with an exception")
            self._queue.end_all()
        self.close()

    @property
    def hosts(self) -> list[str]:
        """The names of the machines, in the order of their ranks; [] once they were given back."""
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
        """Raise ValueError if a submitted call wants more machines than there are."""
        if machines is not None and machines > self._size:
            raise misuse(ValueError(f"machines={machines} on {self._size} held machines: allowed: 1 to {self._size}"))

    def attempt(self, options: Options, call: Call, name: str, number: Attempt, status: RunStatus) -> Steps:
        """Make one attempt of a submitted call, on machines that no other launch has.

        If machines turn out to be lost before anything has run there, it takes others.
        """
        left = TRIES
        while True:
            left -= 1
            self._check_process()
            claim = self._queue.join(MachineClaim(options.machines or self._size, status.notify, status.ask_to_cancel))
            try:
                status.starting = False
                while not self._queue.take(claim):
                    yield Need(f"{name} waits for machines")
                status.starting = True
                status.begins()
                part = yield from _elsewhere(functools.partial(self._part, claim), status)
                return (yield from part.attempt(options, call, name, number, status))
            except LaunchError:
                if not claim.lost or not left:
                    raise
            finally:
                self._leave_claim(claim)

    def _part(self, claim: MachineClaim) -> HeldPart:
        """Return the machines of a claim. If too few are left, wait until the engine has given others."""
        if claim.whole:
            self._machines.open(Options().join_timeout, lambda state: say(f"a launch waits: {state}"))
            self._queue.narrow(claim)
        with self._lock:
            self._parts = {there: part for there, part in self._parts.items() if not any(one.lost for one in there)}
            # The same object for the same machines: keep= finds its ranks by the engine.
            return self._parts.setdefault(tuple(claim.machines), HeldPart(self, self._machines, claim.machines))

    def make_room(self, machines: Sequence[Machine]) -> None:
        """End the ranks of ``keep=`` on any of these machines. LaunchError if other ranks that stay are there."""
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
        """Start ranks that stay, on machines that the calling thread has claimed."""
        session = open_on_machines(machines, options, rules, self._note_use)
        with self._lock:
            self._sessions.append((list(machines.machines), session))
        return session

    @contextlib.contextmanager
    def _taken(self, options: Options) -> Iterator[None]:
        """Hold all of the machines within the block."""
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
        """Wait for the calls that run, end the ranks that stay, and give the machines back. May be called again.

        Does nothing in a fork of the process that holds them.
        """
        if os.getpid() == self._pid:
            self._queue.close("close() was called")
            self._leave()

    def _leave(self) -> None:
        # Queue behind the calls that wait already.
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
            # Ranks that stay count as use: otherwise they would be lost though nobody asked for it.
            in_use = self._queue.in_use or any(not session.over for _, session in self._sessions)
            if in_use or self._left() > 0:
                self._start_timer(again=in_use)
                return
            self._queue.close(f"no call came for {self._idle_timeout:g} s")
        self._leave()

    def _left(self) -> float:
        """Return the seconds that are left of ``idle_timeout``."""
        return self._used_at + (self._idle_timeout or 0.0) - time.monotonic()

    def _start_timer(self, *, again: bool = False) -> None:
        if self._idle_timeout is not None and not self._queue.closed:
            self._timer = threading.Timer(
                self._idle_timeout if again else max(0.0, self._left()), self._leave_if_unused
            )
            # A daemon: the interpreter gives the machines back at its end, and must not wait for the timer.
            self._timer.daemon = True
            self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def __repr__(self) -> str:
        return f"<{len(self.hosts)} machines: {', '.join(self.hosts)}>" if self.hosts else "<no machines any more>"


class HeldPart(PlacedMachines):
    """Some of a cluster's machines, claimed by one launch at a time. It is an engine for ``engine=`` and ``keep=``."""

    def __init__(self, holder: Cluster, whole: Machines, machines: Sequence[Machine]) -> None:
        super().__init__(whole.n_gpus, whole.heartbeat_timeout)
        self._holder = holder
        self.placement = whole.placement
        self.machines = list(machines)

    def attempt(self, options: Options, call: Call, name: str, number: Attempt, status: RunStatus) -> Steps:
        """Make one attempt of a submitted call here."""
        from mlaunch.sweeps.caller.submitted_call import follows, on_kept, output_of  # whose calls use this

        if options.keep is not None:
            own = {"engine": self, "machines": None, "deadline": number.time_left}
            return (yield from on_kept(options.replaced(own), call, status))

        def plan(spec: LaunchSpec, hosts: dict[int, str]) -> OutputPlan:
            return with_hosts(output_of(options, spec, status), hosts)

        sent, around = Call(calls.portable(call.function), call.args, call.kwargs), status.surroundings
        work = Work(name, sent)
        if around is not None:
            work = dataclasses.replace(work, argv=around.argv, path=around.sys_path, surroundings=around)

        def start() -> tuple[LaunchHandle, AllServers]:
            # Ranks of keep= stay there between trials, and would share the devices.
            self._holder.make_room(self.machines)
            return MachinesLaunch(self, options, work, plan, number).start_it()

        handle, servers = yield from _elsewhere(start, status)
        try:
            try:
                with follows(status, handle):
                    ended = yield from handle.drive()
            finally:
                handle.close()
        except BaseException:
            servers.close()
            raise
        yield from _elsewhere(servers.close, status)
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


def _elsewhere(work: Callable[[], T], status: RunStatus) -> Generator[Need, None, T]:
    """Run ``work`` in a new thread, and wait for its result.

    The thread that drives all launches must not block for seconds.
    """
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        status.notify()

    # No thread pool: work that hangs on one machine would delay that of all others.
    threading.Thread(target=run, daemon=True).start()
    while not future.done():
        yield Need(firm=True)
    return future.result()


def _end(session: RanksLaunch) -> None:
    """End ranks that stay, after their calls. A later call on them says why they have ended."""
    session.close(wait=True, evicted=True)


def _nothing() -> None: ...


@dataclass(eq=False)
class MachineClaim:
    """A launch's place in the queue, and then its machines.

    Attributes:
        count: How many machines are wanted; None: the whole allocation, whether its machines are there or not.
        notify: Called, under a lock, when ``take`` may succeed.
        end: A function that ends the launch which has the machines.
        ends: The claim is to give the allocation back.
        whole: It holds the whole allocation, which has too few machines left: first ask the engine for others.
    """

    count: int | None
    notify: Callable[[], None] = _nothing
    end: Callable[[], None] = _nothing
    ends: bool = False
    machines: list[Machine] = field(default_factory=list)
    whole: bool = False

    @property
    def lost(self) -> bool:
        """True if one of its machines is lost. Nobody gets that machine again."""
        return any(machine.lost for machine in self.machines)


class MachineQueue:
    """The queue of one allocation, for any thread. In order of arrival, a launch gets all machines it wants or none.

    Nobody gets lost machines.
    """

    def __init__(self, machines: Machines) -> None:
        # Not threading's: Ctrl-C within it can leave its lock taken, which would block every launch.
        self._changed = interrupts.Condition()
        self.closed = ""  # why nobody gets machines any more
        self._machines = machines
        self._row: deque[MachineClaim] = deque()
        self._holders: list[MachineClaim] = []

    @property
    def in_use(self) -> bool:
        """True if a launch has machines, or waits for them."""
        return bool(self._row or self._holders)

    def join(self, claim: MachineClaim) -> MachineClaim:
        """Put a claim at the end of the queue."""
        with self._changed:
            self._row.append(claim)
        return claim

    def take(self, claim: MachineClaim) -> bool:
        """If it is the claim's turn, give it its machines and return True. LaunchError if they were given back."""
        with self._changed:
            if self.closed and not claim.ends:
                raise LaunchError(f"this allocation was given back ({self.closed}); hold() another one")
            # Only the first claim: otherwise small ones would overtake a large one for ever.
            if self._row[0] is not claim or not self._give(claim):
                return False
            self._row.remove(claim)
            self._holders.append(claim)
            self._tell()
            return True

    def wait(self, claim: MachineClaim) -> None:
        """Wait until the claim has its machines. Can be interrupted."""
        with self._changed:
            while not self.take(claim):
                self._changed.wait()

    def _give(self, claim: MachineClaim) -> bool:
        left = [machine for machine in self._machines.machines if not machine.lost]
        # Too few are left: only a launch that has the whole allocation may ask the engine for others.
        if claim.count is None or len(left) < claim.count:
            claim.whole = not self._holders
            return claim.whole
        taken = {machine for holder in self._holders for machine in holder.machines}
        free = [machine for machine in left if machine not in taken]
        if any(holder.whole for holder in self._holders) or len(free) < claim.count:
            return False
        claim.machines = free[: claim.count]
        return True

    def narrow(self, claim: MachineClaim) -> None:
        """Take the claim's machines from an allocation that is complete again, and leave the others to other claims."""
        with self._changed:
            claim.machines, claim.whole = self._machines.machines[: claim.count], False
            self._tell()

    def leave(self, claim: MachineClaim) -> None:
        """Remove a claim from the queue, or give its machines to others. May be called again."""
        with self._changed:
            for some in (self._row, self._holders):
                if claim in some:
                    some.remove(claim)
            self._tell()

    def close(self, why: str) -> None:
        """Refuse all claims that wait or come later; claims that have machines keep them."""
        with self._changed:
            self.closed = self.closed or why
            self._tell()

    def end_all(self) -> None:
        """End all submitted launches that have machines."""
        with self._changed:
            for claim in self._holders:
                claim.end()

    def _tell(self) -> None:
        self._changed.notify_all()
        for claim in self._row:
            claim.notify()
