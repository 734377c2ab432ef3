"""The caller's handle to a fork server."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlaunch.base import linux
from mlaunch.base.exceptions import LaunchError, LaunchTimeout, describe_exit
from mlaunch.base.fds import close_all, in_forks, memory_file
from mlaunch.base.log import log
from mlaunch.caller import interrupts
from mlaunch.protocol import launch_files, payload
from mlaunch.protocol.calls import Call
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import AgentsEnd, Cancel, LaunchersEnd
from mlaunch.protocol.payload import Payload
from mlaunch.protocol.server_messages import (
    COUNT_TIMEOUT,
    CountDevices,
    DeviceCount,
    NotReady,
    PrepareNext,
    Ready,
    Retire,
    ServerHears,
    ServerSays,
    StartLaunch,
)
from mlaunch.protocol.spec import LaunchSpec

_QUIET_TIME = 0.5  # seconds of a wait before ``on_wait`` is called
_IMPORT_TIMEOUT = 60.0  # seconds beyond the deadline to import torch from a slow disk

_open_channels: weakref.WeakSet[Channel[Any, Any]] = weakref.WeakSet()


class in_memfds:
    """A block with a memfd for each of the named values; for a Payload, its own.

    Not a context manager of contextlib's, and neither is the next one; see ``interrupts``.
    """

    def __init__(self, values: Sequence[tuple[str, object]]) -> None:
        self._values = values
        self._memfds: list[int] = []

    def __enter__(self) -> list[int]:
        try:
            for name, value in self._values:
                if isinstance(value, Payload):
                    self._memfds.append(os.dup(value.memfd))
                    continue
                # Added before the write: an interrupt in a __reduce__ must not lose the descriptor.
                self._memfds.append(memory_file(name))
                with interrupts.allowed():  # pickling runs user code, and may take long
                    payload.write(self._memfds[-1], value)
        except BaseException:
            close_all(self._memfds)
            raise
        return self._memfds

    def __exit__(self, *_: object) -> None:
        close_all(self._memfds)


class standard_streams:
    """A block with the present descriptors 1 and 2, or /dev/null for one that is closed.

    If this process started without one (under cron, for example), any file may have its number now.
    """

    def __enter__(self) -> list[int]:
        self._null = null = os.open(os.devnull, os.O_WRONLY)
        streams = ((1, sys.__stdout__), (2, sys.__stderr__))
        return [null if stream is None or linux.identity(fd) is None else fd for fd, stream in streams]

    def __exit__(self, *_: object) -> None:
        os.close(self._null)


class ServerGoneError(LaunchError):
    """The fork server was gone before it could start a launch."""


class ForkServer:
    """A running fork server. ``wait(seconds)`` returns its exit code, or None if it is still running.

    ``kill``: how to kill a server that is not a child of this process.
    """

    silence = "its agent or its fork server did not answer (was one stopped?) and was killed"

    def __init__(
        self,
        control: Channel[ServerSays, ServerHears],
        pid: int,
        wait: Callable[[float], int | None],
        kill: Callable[[], None] | None = None,
    ) -> None:
        self.pid = pid
        self._kill = kill or functools.partial(os.kill, pid, signal.SIGKILL)  # a child keeps its pid until it is reaped
        self._control = control
        self._wait = wait
        # Reentrant: a signal handler that launches while this thread waits in ready() must get an error, not block.
        self._lock = threading.RLock()
        self._ready: Ready | None = None
        self._waiting = False
        self._killed = False
        self._asked = False  # it has had a request
        self._retired = False
        self._launches: weakref.WeakSet[Channel[Any, Any]] = weakref.WeakSet()
        _open_channels.add(control)

    def ready(self, deadline: float | None = None, on_wait: Callable[[], None] | None = None) -> Ready:
        """Wait until the server has imported torch; return its ``Ready`` record. Calls ``on_wait`` after half a second.

        Raises:
            LaunchTimeout: It was stopped (SIGSTOP) after ``deadline`` seconds, or took a minute more. It was killed.
            LaunchError: Its modules could not be imported.
        """
        with self._lock:
            if self._waiting:
                raise RuntimeError(
                    "a launch from a signal handler, while the same thread waits for the fork server to start; "
                    "call mlaunch.warm_up() early, or launch outside of the handler"
                )
            if self._ready is None:
                self._waiting = True
                try:
                    self._ready = self._hear(deadline, on_wait)
                finally:
                    self._waiting = False
            return self._ready

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The descriptors of which one becomes readable when ``ready`` no longer waits; () if it does not wait now."""
        told = self._ready is not None or linux.wait_readable([self._control.fileno()], 0.0)
        return () if told else (self._control.fileno(),)

    def _hear(self, deadline: float | None, on_wait: Callable[[], None] | None) -> Ready:
        try:
            quiet = _QUIET_TIME if deadline is None else min(deadline, _QUIET_TIME)
            if on_wait is not None and not interrupts.wait_readable([self._control.fileno()], quiet):
                on_wait()
                deadline = None if deadline is None else deadline - quiet
            self._await_word(deadline)
            record = (
                self._control.peek()
            )  # only peeked: an interrupt between a read and its storage would lose the record
        except (EOFError, ConnectionResetError):
            raise LaunchError(f"{self.describe_end()} before it was ready") from None
        if isinstance(record, NotReady):
            told, whole = f"the fork server (pid {self.pid}) could not import its modules:\n", "\n" not in record.reason
            raise LaunchError(record.reason if whole else told + record.reason.rstrip())
        if not isinstance(record, Ready):
            raise LaunchError(f"the fork server (pid {self.pid}) sent {record!r} where Ready was expected")
        if record.lacks:
            log.warning("%s", record.lacks)
        return record

    def _await_word(self, deadline: float | None) -> None:
        """Wait for the server's first record. A stopped server would never send it."""
        for seconds in (deadline, _IMPORT_TIMEOUT):
            if interrupts.wait_readable([self._control.fileno()], seconds):
                return
            if linux.is_stopped(self.pid):
                break
        self.kill()
        raise LaunchTimeout(
            f"the fork server (pid {self.pid}) had not imported torch when the deadline had passed (was it stopped?) "
            f"and was killed; look for what stops processes here (SIGSTOP, a debugger, a frozen cgroup) or slows their "
            f"imports. The next call starts another one"
        )

    def describe_end(self) -> str:
        """Return "the fork server (pid 12) was killed by SIGKILL", after its connection was found closed."""
        return f"the fork server (pid {self.pid}) {self.describe_exit()}"

    def describe_exit(self) -> str:
        """Return how the server has ended, after its connection was found closed."""
        exitcode = self._wait(5.0)
        return "closed its connection" if exitcode is None else describe_exit(exitcode)

    def alive(self) -> bool:
        """True if the server can answer requests.

        False if other code has closed its channel, or if it is stopped (SIGSTOP): it would answer when it is continued.
        """
        if self._killed or not self._control.intact() or self._wait(0.0) is not None:
            return False
        return not linux.is_stopped(self.pid)

    def ended(self) -> bool:
        """True if the server is gone."""
        return self._wait(0.0) is not None

    def kill(self) -> None:
        """End the server at once; its launches end with it."""
        self._killed = True  # set first: the server closes its channels before it can be reaped
        if self._wait(0.0) is None:
            with contextlib.suppress(ProcessLookupError):
                self._kill()

    def count_devices(self, environ: Mapping[str, str]) -> int:
        """Return the number of accelerators visible in ``environ``. Another process counts: that opens the driver."""
        return self._ask_for_devices(CountDevices(), environ).count

    def name_devices(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        """Return the names of the accelerators by number. They are the same in all processes of this machine."""
        return self._ask_for_devices(CountDevices(named=True), environ).names

    def _ask_for_devices(self, question: CountDevices, environ: Mapping[str, str]) -> DeviceCount:
        ours = self._ask(question, [("environ", dict(environ))])
        try:
            if not interrupts.wait_readable([ours.fileno()], COUNT_TIMEOUT):
                raise LaunchError(
                    f"counting the accelerators failed: their driver has not answered for {COUNT_TIMEOUT} s; does "
                    f"nvidia-smi, or its like, answer?"
                )
            answer, _ = ours.receive()
        except EOFError:
            answer = None
        finally:
            ours.close()
        if not isinstance(answer, DeviceCount):
            raise LaunchError(f"counting the accelerators failed: the counting process died ({answer!r})")
        if answer.error:
            raise LaunchError(f"counting the accelerators failed: {answer.error}")
        return answer

    def launch(
        self,
        spec: LaunchSpec,
        call: Call | Payload | None,
        following: AgentsEnd | None = None,
        *,
        more: bool = False,
        held: Sequence[int] = (),
    ) -> LaunchersEnd:
        """Start a launch; return the channel to its agent. ``call`` None: the server has it in memory.

        ``following``: the server's end of the channel of the next launch, which it prepares; None: prepare none.
        ``more``: see StartLaunch. ``held``: descriptors that the launch's processes keep open.
        """
        directory = launch_files.error_directory_of(spec) or launch_files.temporary_directory_of(spec)
        order = StartLaunch(more, directory, len(held), spec.grace_period)
        with standard_streams() as streams:
            beside = [*streams, *([] if following is None else [following.fileno()]), *held]
            return self._ask(order, [("spec", spec), ("call", call)], beside)

    def prepare(self, following: AgentsEnd, *, like: LaunchSpec | None = None, soon: bool = False) -> None:
        """Make the server prepare a launch like the last one. OSError if the server is gone.

        ``following``: the server's end of the channel; ``like``: another spec; ``soon``: see PrepareNext.
        """
        self._asked = True
        specs = [] if like is None else [("spec", like)]
        with standard_streams() as streams, in_memfds(specs) as memfds, self._lock:
            self._control.send(PrepareNext(soon), [following.fileno(), *memfds, *(streams if memfds else [])])

    def adopt(self, launch: LaunchersEnd) -> None:
        """Add a prepared launch to the running ones."""
        self._launches.add(launch)

    def _ask(
        self, record: ServerHears, values: Sequence[tuple[str, object]], extra: Sequence[int] = ()
    ) -> Channel[Any, Any]:  # the other end answers: a launch's agent, or a count of devices
        ours: Channel[Any, Any]
        self._asked = True
        ours, theirs = Channel.pair()
        _open_channels.add(ours)
        self._launches.add(ours)
        try:
            with in_memfds(values) as memfds, self._lock:
                self._control.send(record, [*memfds, theirs.fileno(), *extra])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def retire(self) -> None:
        """Ask the server to end after the running launches; do not wait. A stopped server without launches is killed.

        Call it again for a server whose first record has not come yet: another thread may wait for that record.
        """
        if linux.is_stopped(self.pid) and not any(launch.fileno() >= 0 for launch in self._launches):
            self.kill()
        if not self._retired and self._control.intact() and not self.waits_for:
            self._retired = True
            self._control.try_send(Retire())

    def close(self, timeout: float = 10.0) -> None:
        """End the server and its launches (a daemon thread's may still run at the end of the interpreter)."""
        if not self._asked:  # no request: nothing to clean up
            self.kill()
        for launch in list(self._launches):
            if launch.intact():
                launch.try_send(Cancel())
        self._control.close()
        if linux.is_stopped(self.pid) or self._wait(timeout) is None:
            self.kill()
            self._wait(timeout)


def forget_inherited() -> None:
    """Close the parent's servers and launches. Called in a fork of the caller."""
    for channel in list(_open_channels):
        channel.close()


in_forks(forget_inherited)
