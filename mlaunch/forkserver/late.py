"""Late imports: what ranks had to import, this server imports for later ranks."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Collection, Sequence
from typing import NoReturn

from mlaunch.base import linux
from mlaunch.base.fds import OwnedFds
from mlaunch.base.own_process import name_process
from mlaunch.forkserver.children import Child
from mlaunch.forkserver.imports import held, share
from mlaunch.protocol import late_imports
from mlaunch.rank.setup import process

_LIMIT = 120  # seconds; torch._dynamo takes one, and ten times that on a busy machine
_HOLD = 3.0  # seconds that launches are held back: callers wait for an agent only a little longer than a deadline
_NICE = 5  # a launch that comes meanwhile is more urgent


class LateImports:
    """Imports that a fork has tried first: one that opens a device, or starts a thread, would ruin the server."""

    def __init__(self) -> None:
        self._off = os.environ.get("MLAUNCH_PREPARE") == "0"
        self._given_up: set[str] = set()
        self._on_trial: Sequence[str] = ()
        self._begun = 0.0
        self._told = -1 if self._off else late_imports.listen()

    def fds(self) -> list[int]:
        """Return a descriptor that can be read when a rank has imported a module of torch or mlaunch."""
        return [] if self._off else [self._told]

    def hears(self, ready: Collection[int]) -> bool:
        """True if a rank has. ``ready``: descriptors that can be read."""
        if self._told not in ready:
            return False
        late_imports.hear()
        return True

    def holds(self) -> float:
        """Return for how many seconds launches should wait, as their ranks would import what is on trial; 0: none.

        Their deadlines have not begun. A trial may hang, so there is a limit.
        """
        if not {*late_imports.NAMES} & {*self._on_trial}:
            return 0.0
        return max(0.0, self._begun + _HOLD - time.monotonic())

    def wanted(self) -> bool:
        """True if there is something to try."""
        return not self._off and not self._on_trial and bool(self._missing())

    def wanted_now(self) -> bool:
        """True if torch's or ours are to be tried: they take a second of each rank."""
        return self.wanted() and self._missing()[0] in late_imports.NAMES

    def _missing(self) -> list[str]:
        """Return the modules to try next: torch's and mlaunch's first, since the rest may fail."""
        known, standard = (
            [name for name in names if name not in self._given_up]
            for names in (late_imports.missing(), late_imports.missing_standard())
        )
        # Torch's make later forks slower (from 26 to 31 ms for a call of 2 ranks in a row, from 36 to 40 with
        # torch._dynamo), so they wait until a rank has needed them: the first optimizer takes 0.95 s without, 0.03 s
        # with.
        return known or standard

    def begin(self, owned: OwnedFds) -> Child | None:
        """Fork a process that tries to import the missing modules; None if the system refuses. It closes ``owned``."""
        self._on_trial, self._begun = self._missing(), time.monotonic()
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            self.end(1)
            return None
        if pid == 0:
            self._try_out(parent, owned)
        return Child(pid, os.pidfd_open(pid), None)

    def _try_out(self, parent: int, owned: OwnedFds) -> NoReturn:
        """Import, and exit with 0 if that leaves nothing behind that a server must not have."""
        code = 1
        try:
            linux.die_with(parent)
            name_process("trial import")
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_LIMIT)  # meanwhile nothing else is tried
            owned.close_in_child()
            with contextlib.suppress(OSError):
                os.nice(_NICE)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the second import repeats its warnings
            before = held()
            self._import()
            # Threads do not survive a fork, and all ranks would share an open file.
            code = int(held() != before)
        finally:
            os._exit(code)

    def end(self, status: int) -> None:
        """Import the modules here if the trial went well; otherwise give them up for ever."""
        with contextlib.suppress(Exception, SystemExit):  # a half import does no harm, and ranks report the error
            if status == 0:
                self._import()
                gc.collect()
                share()
        gc.enable()
        # After a success, too: a module that removes itself from sys.modules would be tried for ever.
        self._given_up.update(self._on_trial)
        self._on_trial = ()

    def _import(self) -> None:
        gc.disable()  # see imports.load
        with process.noting_variables():
            for name in self._on_trial:
                late_imports.import_module(name)
