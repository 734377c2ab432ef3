"""Machines that an engine holds for many calls."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mlaunch.base.exceptions import LaunchError
from mlaunch.base.misuse import misuse
from mlaunch.caller.options.launch_options import Options
from mlaunch.engines.held_part import HeldPart
from mlaunch.engines.launch.engine_call import call_on_machines
from mlaunch.engines.launch.kept_launch import open_on_machines
from mlaunch.engines.launch.machine import Machine
from mlaunch.engines.launch.machines import Machines, say
from mlaunch.engines.launch.placed_machines import PlacedMachines
from mlaunch.engines.machine_claims import MachineClaim, MachineQueue

if TYPE_CHECKING:
    from mlaunch.caller.launch.settle import Ended
    from mlaunch.caller.ranks.session import RanksLaunch
from mlaunch.caller.ranks.stay_rules import StayRules


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
        self._lock = threading.Lock()
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
        """Runs a function on these machines; see ``call_on_machines``."""
        with self._taken(options):
            return call_on_machines(self._machines, options, function, args, kwargs)

    def open_session(self, options: Options, rules: StayRules) -> RanksLaunch:
        """Starts ranks that stay on these machines."""
        with self._taken(options):
            return self._opened(self._machines, options, rules)

    def check_trial(self, machines: int | None) -> None:
        """Raises what keeps a launch of several from having so many machines: ValueError."""
        if machines is not None and machines > self._size:
            raise misuse(ValueError(f"machines={machines} on {self._size} held machines: allowed: 1 to {self._size}"))

    def claim(self, machines: int | None, notify: Callable[[], None], end: Callable[[], None]) -> TrialClaim:
        """Gets in line for so many of its machines; None: for all. ``notify``: as of ``MachineQueue.join``.

        ``end``: ends the launch, if the block is left in which the machines are held.
        """
        self._check_process()
        claim = self._queue.join(machines or self._size, notify)
        claim.end = end
        return TrialClaim(self, self._machines, claim, self._leave_claim)

    def part_of(self, machines: Sequence[Machine]) -> HeldPart:
        """Returns these machines as an engine, the same one for the same machines: ranks stay there."""
        with self._lock:
            self._parts = {there: part for there, part in self._parts.items() if not any(one.lost for one in there)}
            # The same object for the same machines: keep= finds its ranks by the engine.
            return self._parts.setdefault(tuple(machines), HeldPart(self, self._machines, machines))

    def open_on_part(self, part: HeldPart, options: Options, rules: StayRules) -> RanksLaunch:
        """Starts ranks that stay on machines that a launch of several has claimed."""
        self.make_room(part.machines)
        return self._opened(part, options, rules)

    def make_room(self, machines: Sequence[Machine]) -> None:
        """Ends ranks on some of these machines that stay for as long as nobody else wants those."""
        with self._lock:
            self._sessions = [one for one in self._sessions if not one[1].over]
            found = [session for there, session in self._sessions if not set(there).isdisjoint(machines)]
        for session in found:
            if not session.rules.yields:
                raise misuse(LaunchError(
                    f"these machines are in use by {session.handle.idle_spec.name}, which stay until they are closed: "
                    f"call them, or close() them before others run here"
                ))  # fmt: skip
            _end(session)

    def _opened(self, machines: PlacedMachines, options: Options, rules: StayRules) -> RanksLaunch:
        session = open_on_machines(machines, options, rules, self._note_use)
        with self._lock:
            self._sessions.append((list(machines.machines), session))
        return session

    @contextlib.contextmanager
    def _taken(self, options: Options) -> Iterator[None]:
        """Gives the machines to one who may have them all."""
        self._check_process()
        if options.machines not in {None, self._size} and not self._queue.closed:
            raise misuse(ValueError(f"machines={options.machines} on {self._size} held machines: allowed: "
                                    f"{self._size}, or None"))  # fmt: skip
        claim = self._queue.join(None)
        try:
            claim.wait()
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
        claim.close()

    def _note_use(self) -> None:
        self._used_at = time.monotonic()

    def close(self) -> None:
        """Gives the machines back, once calls that run are over, and ends ranks there. May be called again.

        Does nothing in a fork of the process that holds them.
        """
        if os.getpid() == self._pid:
            self._queue.close("close() was called")
            self._leave()

    def _leave(self) -> None:
        # In line behind the calls that wait already: these were promised the machines.
        claim = self._queue.join(None, ends=True)
        try:
            claim.wait()
            self._stop_timer()
            for _, session in self._sessions:
                _end(session)
            self._machines.close()
        finally:
            claim.close()

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
        """Returns the seconds until nobody has used them for too long."""
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


class TrialClaim:
    """A place in line for machines of an allocation."""

    def __init__(
        self, holder: Cluster, machines: Machines, claim: MachineClaim, leave: Callable[[MachineClaim], None]
    ) -> None:
        self._holder, self._machines, self._claim, self._leave = holder, machines, claim, leave

    def take(self) -> bool:
        """Tells whether it has them. LaunchError: the allocation was given back."""
        return self._claim.take()

    def part(self) -> HeldPart:
        """Returns what it has. Waits, if too few are left, until the engine has given others for those that are lost.

        Raises:
            LaunchError: It gives none.
        """
        if self._claim.whole:
            self._machines.open(Options().join_timeout, lambda state: say(f"a launch waits: {state}"))
            self._claim.narrow()
        return self._holder.part_of(self._claim.machines)

    @property
    def lost(self) -> bool:
        """Tells whether one of them is lost: nobody gets that again."""
        return any(machine.lost for machine in self._claim.machines)

    def close(self) -> None:
        """Leaves the queue, or gives the machines to others. May be called again."""
        self._leave(self._claim)


def _end(session: RanksLaunch) -> None:
    """Ends ranks that stay, after their calls. They are not lost: whoever calls them hears what has become of this."""
    session.close(wait=True, evicted=True)
