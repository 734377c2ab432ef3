"""Machines that an engine holds for many calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mlaunch.base.errors import LaunchError
from mlaunch.base.misuse import misuse
from mlaunch.engines.call import call_on_machines
from mlaunch.engines.machines import Machines

if TYPE_CHECKING:
    from mlaunch.caller.options import Options
    from mlaunch.caller.settle import Ended


class Cluster:
    """What ``hold`` returns: as ``engine=``, it has a call run there. Several threads may call, one after the other.

    Use it in a ``with`` statement, or ``close()`` it. A machine that is lost ends the call that runs; the next one
    asks the engine for others.
    """

    def __init__(self, machines: Machines, idle_timeout: float | None) -> None:
        self._machines = machines
        self._size = len(machines.hosts)
        self._idle_timeout = idle_timeout
        self._timer: threading.Timer | None = None
        self._closed = ""  # why
        self._lock = threading.Lock()
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
        with self._lock:
            if self._closed:
                raise LaunchError(f"this allocation was given back ({self._closed}); hold() another one")
            if options.machines not in {None, self._size}:
                raise misuse(ValueError(f"machines={options.machines} on {self._size} held machines: allowed: "
                                        f"{self._size}, or None"))  # fmt: skip
            self._stop_timer()
            try:
                return call_on_machines(self._machines, options, function, args, kwargs)
            finally:
                self._start_timer()

    def close(self) -> None:
        """Gives the machines back, once a call that runs is over. May be called again."""
        self._leave("close() was called")

    def _leave(self, why: str) -> None:
        with self._lock:
            self._stop_timer()
            self._closed = self._closed or why
            self._machines.close()

    def _start_timer(self) -> None:
        if self._idle_timeout is not None and not self._closed:
            why = f"no call came for {self._idle_timeout:g} s"
            self._timer = threading.Timer(self._idle_timeout, self._leave, [why])
            self._timer.daemon = True
            self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def __repr__(self) -> str:
        return f"<{len(self.hosts)} machines: {', '.join(self.hosts)}>" if self.hosts else "<no machines any more>"
