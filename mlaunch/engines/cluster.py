"""Machines that an engine has given, with a member on each: for one call, or held for many."""

from __future__ import annotations

import atexit
import contextlib
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mlaunch.base.errors import LaunchError
from mlaunch.caller import interrupts
from mlaunch.engines.engine import Engine, Placement
from mlaunch.engines.machine import Machine
from mlaunch.engines.messages import MODULE, NotPrepared, Prepare, Prepared

if TYPE_CHECKING:
    from mlaunch.caller.options import Options
    from mlaunch.caller.settle import Ended

_LOOK_DELAY = 0.1  # seconds between questions to the engine
_LAST_WORDS_TIMEOUT = 2.0  # seconds for what a member that has ended wrote, and for what its engine says of that


class Cluster:
    """As an ``engine=`` for calls. It may be used from several threads, whose calls wait for each other.

    Use it in a ``with`` statement, or ``close()`` it.
    """

    def __init__(self, engine: Engine, machines: int | None, n_gpus: int | None, idle_timeout: float | None) -> None:
        self._engine = engine
        self._wanted = machines
        self._n_gpus = n_gpus
        self._idle_timeout = idle_timeout
        self._placement: Placement | None = None
        self._timer: threading.Timer | None = None
        self._closed = ""  # why
        self.lock = threading.Lock()
        self.machines: list[Machine] = []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def hosts(self) -> list[str]:
        """The names of its machines, in the order of their ranks; [] before they are there, and after."""
        return [machine.host for machine in self.machines]

    def call(
        self, options: Options, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Ended:
        """Runs a function on these machines."""
        from mlaunch.engines.call import call_on_machines

        with self.lock:
            self._stop_timer()
            try:
                return call_on_machines(self, options, function, args, kwargs)
            finally:
                self._start_timer()

    def open(self, tell: Callable[[str], None] = lambda _: None) -> None:
        """Waits until the machines are there, unless they are. ``tell``: gets what they wait for, when that changes.

        Raises:
            LaunchError: They do not come, or mlaunch cannot run there.
        """
        if self._closed:
            raise LaunchError(f"this allocation was given back ({self._closed}); hold() another one")
        if self.machines:
            return
        atexit.register(self.close)
        try:
            self._open(tell)
        except BaseException:
            self._give_back()
            raise
        self._start_timer()

    def _open(self, tell: Callable[[str], None]) -> None:
        self._placement = placement = self._engine.place(self._wanted, [self._engine.python, "-u", "-m", MODULE])
        told = ""
        while state := placement.state():
            if state != told:
                tell(state)
            told = state
            interrupts.wait_readable([], _LOOK_DELAY)
        for number in range(len(placement.sizes)):
            self.machines.append(Machine(number, placement.start(number)))
        waiting = list(self.machines)
        while waiting:
            self._wait(waiting)
            waiting = [machine for machine in waiting if not self._greeted(machine)]

    def _wait(self, machines: Sequence[Machine]) -> None:
        """Waits until one has said something. What they write to standard error is kept."""
        errors = {machine.stderr: machine for machine in machines if machine.stderr >= 0}
        ready = interrupts.wait_readable([*(machine.stream.fileno() for machine in machines), *errors])
        for fd in ready:
            if fd in errors:
                errors[fd].hear_stderr()

    def _greeted(self, machine: Machine) -> bool:
        try:
            return machine.greet()
        except EOFError:
            raise LaunchError(self._why_not(machine)) from None

    def _why_not(self, machine: Machine) -> str:
        """Says why a member did not start."""
        fate, words = self.end_of(machine)
        name = machine.host or f"machine {machine.number}"
        lines = [f"mlaunch did not start on {name}" + (f": {fate}" if fate else "")]
        lines += [f"  {line}" for line in words.splitlines()]
        if "No module named" in words and "mlaunch" in words:
            from mlaunch import _version

            install = shlex.join([self._engine.python, "-m", "pip", "install", f"mlaunch=={_version.__version__}"])
            lines.append(f"mlaunch must be installed there: {install}")
        return "\n".join(lines)

    def end_of(self, machine: Machine) -> tuple[str, str]:
        """Returns what the engine says of a member that has ended, and what that wrote last."""
        until = time.monotonic() + _LAST_WORDS_TIMEOUT
        fate = self._placement.fate(machine.number) if self._placement is not None else ""
        while machine.stderr >= 0 and time.monotonic() < until:
            interrupts.wait_readable([machine.stderr], until - time.monotonic())
            machine.hear_stderr()
        return fate, machine.last_words()

    def prepare(self, order: Prepare) -> None:
        """Asks all machines what they can give to a launch.

        Raises:
            LaunchError: A machine cannot give it, or has ended.
        """
        for machine in self.machines:
            machine.prepared = None
            machine.stream.send(self._for(machine, order))
        waiting = list(self.machines)
        while waiting:
            self._wait(waiting)
            for machine in waiting:
                self._hear_prepared(machine)
            waiting = [machine for machine in waiting if machine.prepared is None]
        start = 0
        for machine in self.machines:
            machine.rank_start = start
            start += len(machine.ranks)

    def _for(self, machine: Machine, order: Prepare) -> Prepare:
        size = self._placement.sizes[machine.number] if self._placement is not None else None
        given = size or order.options.get("n_gpus") or self._n_gpus
        return Prepare({**order.options, "n_gpus": given}, order.name, order.cwd, order.sys_path)

    def _hear_prepared(self, machine: Machine) -> None:
        try:
            found = machine.stream.receive()
        except EOFError:
            machine.lost = True
            fate, words = self.end_of(machine)
            raise LaunchError(f"host {machine.host} was lost: {fate or words or 'its member has ended'}") from None
        for record, _ in found:
            if isinstance(record, NotPrepared):
                raise LaunchError(f"host {machine.host} cannot take part: {record.text}")
            if isinstance(record, Prepared):
                machine.prepared = record
                machine.shift = time.monotonic() - record.clock

    def renew(self) -> None:
        """Gives the machines back if one of them is lost, so that ``open`` gets others."""
        if any(machine.lost for machine in self.machines):
            self._give_back()

    def abandon(self) -> None:
        """Gives them back after a launch that did not end in order."""
        for machine in self.machines:
            machine.lost = True

    def kill(self) -> None:
        """Ends all that runs on them."""
        placement = self._placement
        if placement is not None:
            placement.cancel()

    def close(self, why: str = "close() was called") -> None:
        """Gives the machines back. May be called again."""
        self._stop_timer()
        self._closed = self._closed or why
        self._give_back()

    def _give_back(self) -> None:
        machines, self.machines = self.machines, []
        placement, self._placement = self._placement, None
        for machine in machines:
            machine.close()
        if placement is not None:
            placement.cancel()
        with contextlib.suppress(Exception):
            atexit.unregister(self.close)

    def _start_timer(self) -> None:
        if self._idle_timeout is not None and not self._closed:
            self._timer = threading.Timer(self._idle_timeout, self._leave)
            self._timer.daemon = True
            self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _leave(self) -> None:
        with self.lock:
            self.close(f"no call came for {self._idle_timeout:g} s")

    def __repr__(self) -> str:
        return f"<{len(self.machines)} machines: {', '.join(self.hosts)}>"


def say(text: str) -> None:
    """Tells people what a call waits for."""
    print(f"mlaunch: {text}", file=sys.stderr, flush=True)
