"""Machines that an engine holds for many calls."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mlaunch.base.exceptions import LaunchError
from mlaunch.base.misuse import misuse
from mlaunch.engines.launch.engine_call import call_on_machines
from mlaunch.engines.launch.kept_launch import open_on_machines
from mlaunch.engines.launch.machines import Machines

if TYPE_CHECKING:
    from mlaunch.caller.launch.settle import Ended
    from mlaunch.caller.options.launch_options import Options
    from mlaunch.caller.ranks.session import RanksLaunch


class Cluster:
    """What ``hold`` returns: as ``engine=``, it has a call run there. Several threads may call, one after the other.

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
        self._session: RanksLaunch | None = None  # of ranks that stay
        self._closed = ""  # why
        self._lock = threading.Lock()
        self._pid = os.getpid()  # whose machines they are: in a fork, another thread's lock would stay locked
        self._start_timer()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def open_session(self, options: Options, idle_timeout: float | None) -> RanksLaunch:
        """Starts ranks that stay on these machines."""
        with self._taken(options):
            self._session = open_on_machines(self._machines, options, idle_timeout, self._note_use)
            return self._session

    @contextlib.contextmanager
    def _taken(self, options: Options) -> Iterator[None]:
        """Gives the machines to one who may have them."""
        if os.getpid() != self._pid:
            raise LaunchError(
                f"these machines belong to process {self._pid}, of which this one (pid {os.getpid()}) is a fork: "
                f"hold() others here"
            )
        with self._lock:
            if self._closed:
                raise LaunchError(f"this allocation was given back ({self._closed}); hold() another one")
            if options.machines not in {None, self._size}:
                raise misuse(ValueError(f"machines={options.machines} on {self._size} held machines: allowed: "
                                        f"{self._size}, or None"))  # fmt: skip
            self._free()
            self._stop_timer()
            try:
                yield
            finally:
                self._note_use()
                self._start_timer()

    def _free(self) -> None:
        """Ends ranks that stay for as long as nobody else wants the machines."""
        session = self._session
        if session is None or session.over:
            return
        if not session.yields:
            raise misuse(LaunchError(
                f"{session.handle.idle_spec.name} have taken these machines until they end: call them, or close() them "
                f"before others run here"
            ))  # fmt: skip
        _end(session)

    def _note_use(self) -> None:
        self._used_at = time.monotonic()

    def close(self) -> None:
        """Gives the machines back, once a call that runs is over, and ends ranks there. May be called again.

        Does nothing in a fork of the process that holds them.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._leave("close() was called")

    def _leave(self, why: str) -> None:
        self._stop_timer()
        self._closed = self._closed or why
        if self._session is not None:
            _end(self._session)
        self._machines.close()

    def _leave_if_unused(self) -> None:
        with self._lock:
            in_use = self._session is not None and not self._session.over
            if self._timer is threading.current_thread():  # else a call came, or close()
                if in_use or self._left() > 0:
                    self._start_timer(again=in_use)
                else:
                    self._leave(f"no call came for {self._idle_timeout:g} s")

    def _left(self) -> float:
        """Returns the seconds until nobody has used them for too long."""
        return self._used_at + (self._idle_timeout or 0.0) - time.monotonic()

    def _start_timer(self, *, again: bool = False) -> None:
        if self._idle_timeout is not None and not self._closed:
            self._timer = threading.Timer(
                self._idle_timeout if again else max(0.0, self._left()), self._leave_if_unused
            )
            self._timer.daemon = True
            self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def __repr__(self) -> str:
        return f"<{len(self.hosts)} machines: {', '.join(self.hosts)}>" if self.hosts else "<no machines any more>"


def _end(session: RanksLaunch) -> None:
    """Ends ranks that stay, after their calls. They are not lost: whoever calls them hears what has become of this."""
    session.expired = True
    session.close(wait=True)
