"""The caller's handle to a fork server: how it is asked, and how it ends."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlaunch.base import linux
from mlaunch.base.exceptions import LaunchError, LaunchTimeout, describe_exit
from mlaunch.base.fds import in_forks
from mlaunch.base.log import log
from mlaunch.caller import interrupts
from mlaunch.caller.server.attachments import in_memfds, standard_streams
from mlaunch.protocol import error_file, temporary
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

_QUIET_TIME = 0.5  # seconds in which nobody wonders
_IMPORT_TIMEOUT = 60.0  # seconds beyond the deadline in which torch may come from a slow disk

_open_channels: weakref.WeakSet[Channel[Any, Any]] = weakref.WeakSet()


class ServerGoneError(LaunchError):
    """The fork server was gone before it could start a launch."""


class ForkServer:
    """A running fork server. ``wait(seconds)`` returns its exit code, or None if it lives on.

    ``kill``: for one that is no child of this process.
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
        self._kill = kill or functools.partial(os.kill, pid, signal.SIGKILL)  # a child's number is its own
        self._control = control
        self._wait = wait
        # Reentrant: a signal handler that launches while this thread waits in ready() must come to the error there.
        self._lock = threading.RLock()
        self._ready: Ready | None = None
        self._waiting = False
        self._killed = False
        self._asked = False  # for anything
        self._retired = False
        self._launches: weakref.WeakSet[Channel[Any, Any]] = weakref.WeakSet()
        _open_channels.add(control)

    def ready(self, deadline: float | None = None, on_wait: Callable[[], None] | None = None) -> Ready:
        """Tells what its torch offers; waits for the import. ``on_wait`` is called if that takes half a second.

        Raises:
            LaunchTimeout: It was stopped when ``deadline`` seconds had passed, or took a minute more. It is killed.
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
        """What can be read when ``ready`` need not wait; nothing, if it need not now."""
        told = self._ready is not None or linux.wait_readable([self._control.fileno()], 0.0)
        return () if told else (self._control.fileno(),)

    def _hear(self, deadline: float | None, on_wait: Callable[[], None] | None) -> Ready:
        try:
            quiet = _QUIET_TIME if deadline is None else min(deadline, _QUIET_TIME)
            if on_wait is not None and not interrupts.wait_readable([self._control.fileno()], quiet):
                on_wait()
                deadline = None if deadline is None else deadline - quiet
            self._await_word(deadline)
            record = self._control.peek()  # it stays there: an interrupt between reading and keeping it loses nothing
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
        """Waits for its first word; one that somebody has stopped would never say it."""
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
        """Says how the server, whose connection was found closed, came to its end."""
        return f"the fork server (pid {self.pid}) {self.describe_exit()}"

    def describe_exit(self) -> str:
        """Says how a server whose connection was found closed has ended."""
        exitcode = self._wait(5.0)
        return "closed its connection" if exitcode is None else describe_exit(exitcode)

    def alive(self) -> bool:
        """Tells whether it can be asked; not if the descriptor of its channel has become somebody else's.

        One that somebody has stopped cannot either: who asked it would wait until somebody wakes it.
        """
        if self._killed or not self._control.intact() or self._wait(0.0) is not None:
            return False
        return not linux.is_stopped(self.pid)

    def ended(self) -> bool:
        """Tells whether the server is gone."""
        return self._wait(0.0) is not None

    def kill(self) -> None:
        """Ends it at once; its launches end with it."""
        self._killed = True  # from now on: it closes its channels before it can be reaped
        if self._wait(0.0) is None:
            with contextlib.suppress(ProcessLookupError):
                self._kill()

    def count_devices(self, environ: Mapping[str, str]) -> int:
        """Counts the accelerators visible in ``environ``. In a process of its own, since it wakes the driver."""
        return self._ask_for_devices(CountDevices(), environ).count

    def name_devices(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        """Names the accelerators, in the order of their numbers, as every process of this machine would."""
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
        """Starts a launch; the channel is to its agent. ``call`` None: the server has it in memory.

        ``following``: its end of the channel of the next launch, which it is to prepare; None: it is not. ``more``:
        see StartLaunch. ``held``: descriptors that its processes are to hold.
        """
        directory = error_file.directory_of(spec) or temporary.directory_of(spec)
        order = StartLaunch(more, directory, len(held), spec.grace_period)
        with standard_streams() as streams:
            beside = [*streams, *([] if following is None else [following.fileno()]), *held]
            return self._ask(order, [("spec", spec), ("call", call)], beside)

    def prepare(self, following: AgentsEnd, *, like: LaunchSpec | None = None, soon: bool = False) -> None:
        """Lets the server prepare a launch, as the last one was. OSError if the server is gone.

        ``following``: its end of the channel; ``like``: how else it is to be; ``soon``: see PrepareNext.
        """
        self._asked = True
        specs = [] if like is None else [("spec", like)]
        with standard_streams() as streams, in_memfds(specs) as memfds, self._lock:
            self._control.send(PrepareNext(soon), [following.fileno(), *memfds, *(streams if memfds else [])])

    def adopt(self, launch: LaunchersEnd) -> None:
        """Counts a prepared launch among those that run."""
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
        """Let running launches end, then the server; do not wait. One that is stopped and has none is killed.

        To be repeated for one that has not said its first word yet: another thread may wait for that.
        """
        if linux.is_stopped(self.pid) and not any(launch.fileno() >= 0 for launch in self._launches):
            self.kill()
        if not self._retired and self._control.intact() and not self.waits_for:
            self._retired = True
            self._control.try_send(Retire())

    def close(self, timeout: float = 10.0) -> None:
        """End the server and what still runs there (a daemon thread's launch, at the end of the interpreter)."""
        if not self._asked:  # nothing of it has to be tidied up, whatever it is doing
            self.kill()
        for launch in list(self._launches):
            if launch.intact():
                launch.try_send(Cancel())
        self._control.close()
        if linux.is_stopped(self.pid) or self._wait(timeout) is None:
            self.kill()
            self._wait(timeout)


def forget_inherited() -> None:
    """Closes the parent's servers and launches, which are not ours, in a fork of the caller."""
    for channel in list(_open_channels):
        channel.close()


in_forks(forget_inherited)
