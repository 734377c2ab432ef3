"""The caller's handle to a fork server, and how one is started: in a new interpreter, or as a fork of this process."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from mlaunch.base import linux
from mlaunch.base.exceptions import LaunchError, LaunchTimeout, describe_exit
from mlaunch.base.fds import KeptFd, close_all, in_forks, memory_file
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.log import log
from mlaunch.base.own_process import not_followed, stay_unfollowed
from mlaunch.caller import interrupts
from mlaunch.caller.report.user_frames import warn_caller
from mlaunch.protocol import by_value, launch_files, payload
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

if TYPE_CHECKING:
    from mlaunch.protocol.server_messages import ServerHears, ServerSays


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


# The start of fork servers. ``forkserver``: one per caller process, started at the first launch, warm until the caller
# ends. ``spawn``: a new interpreter that serves one launch. ``fork``: a fork of the caller that serves one.

_BOOTSTRAP = "import sys; sys.path[:] = sys.argv[3:]; from mlaunch.forkserver.main import main; main({}, {}, {})"
# A fork copies page tables, and torch's heap has 80 MiB. On huge pages a fork takes half of the time.
_HUGE_HEAP = "glibc.malloc.hugetlb=1"


@frozen_record
class Interpreter:
    """The settings of a fork server's interpreter, for commands, which need other paths and standard input."""

    executable: str = field(default_factory=lambda: sys.executable)
    path: Sequence[str] = field(default_factory=lambda: sys.path)
    preload: Sequence[str] = ()  # modules to import once
    stdin: int | None = subprocess.DEVNULL  # None: this process's


def start_interpreter(environ: Mapping[str, str], like: Interpreter | None = None) -> ForkServer:
    """Start a fork server in a new interpreter with the caller's flags and paths. It imports torch later."""
    linux.check_kernel()
    like = like or Interpreter()
    ours: Channel[ServerSays, ServerHears]
    ours, theirs = Channel.pair()
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    code = _BOOTSTRAP.format(theirs.fileno(), os.getpid(), tuple(like.preload))
    with not_followed():
        process = subprocess.Popen(
            [like.executable, *flags, "-c", code, "mlaunch-fork-server", str(os.getpid()), *like.path],
            env=with_huge_heap(environ),
            stdin=like.stdin,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # only the caller reacts to a terminal's Ctrl-C and hang-up
        )
    theirs.close()
    _interpreters.add(process)

    def wait(seconds: float) -> int | None:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    return ForkServer(ours, process.pid, wait)


def with_huge_heap(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a fork server's interpreter, in which its heap is on huge pages."""
    tunables = [environ["GLIBC_TUNABLES"]] if "GLIBC_TUNABLES" in environ else []
    return {**environ, "GLIBC_TUNABLES": ":".join([*tunables, _HUGE_HEAP])}


def _disown() -> None:
    """Mark interpreters as ended in a fork of the caller: Popen would warn about them, which are not its children."""
    for interpreter in _interpreters:
        interpreter.returncode = interpreter.returncode or 0


_interpreters: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()
in_forks(_disown)


def start_fork(call: Call) -> ForkServer:
    """Start a fork of this process that serves one launch, with the call in memory."""
    from mlaunch.base import own_process
    from mlaunch.rank import process

    linux.check_kernel()
    _check_forkable()
    # A fork that has libgomp's pool without its threads hangs in its first parallel operation.
    own_process.give_back_openmp_threads()
    ours: Channel[ServerSays, ServerHears]
    ours, theirs = Channel.pair()
    caller = os.getpid()
    process.flush()  # every fork would write the content of its buffers again, such as mlaunch's warning
    in_common = by_value.of_main(call.function)
    with warnings.catch_warnings(), not_followed():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of threads: _check_forkable has said it
        pid = os.fork()
    if pid == 0:
        by_value.inherit(in_common)
        _become_server(ours, theirs, caller, call)
    theirs.close()
    return ForkServer(ours, pid, _Waiter(pid))


def _become_server(
    ours: Channel[ServerSays, ServerHears], theirs: Channel[ServerHears, ServerSays], caller: int, call: Call
) -> None:
    from mlaunch.forkserver.main import serve
    from mlaunch.rank import process

    try:
        stay_unfollowed()
        ours.close()
        # Out of the terminal's process group: only the caller reacts to Ctrl-C and hang-up.
        os.setsid()
        linux.open_standard_streams()
        process.reset_process()
    except BaseException:
        os._exit(1)  # not sys.exit(): the caller's exit handlers would run here
    serve(theirs, caller, call)


class _Waiter:
    """The exit status of a forked child, awaited once and then remembered."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pidfd = KeptFd(os.pidfd_open(pid))
        self._exitcode: int | None = None

    def __call__(self, seconds: float) -> int | None:
        if self._exitcode is None and not self._pidfd.intact():
            self._pidfd = KeptFd(os.pidfd_open(self._pid))  # it is not reaped, so the pid is its own
        if self._exitcode is None and linux.wait_readable([self._pidfd.fd], seconds):
            try:
                _, status = os.waitpid(self._pid, 0)
            except ChildProcessError:  # other code in this process has reaped it
                status = 0
            self._exitcode = os.waitstatus_to_exitcode(status)
            self._pidfd.close()
        return self._exitcode


def _check_forkable() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        from mlaunch.rank import device

        accelerator = device.accelerator()
        if accelerator is not None and torch.get_device_module(accelerator).is_initialized():
            raise RuntimeError(
                f"start_method='fork': this process has initialised {accelerator}, and a fork of it could not "
                f"use the devices; use start_method='forkserver' (the default), which does not fork this process"
            )
    if threading.active_count() > 1:
        _warn_of_threads()


@functools.cache  # once: the threads of a notebook are always there
def _warn_of_threads() -> None:
    others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    warn_caller(
        f"start_method='fork' in a process with {len(others)} other thread(s) ({', '.join(others[:5])}): a lock that "
        f"one of them holds now stays locked in the ranks; start_method='forkserver' has no such danger"
    )
