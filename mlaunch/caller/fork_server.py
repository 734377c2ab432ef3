"""The caller's side of the fork server: how one comes to be, and how it is asked.

``forkserver``: one per caller process, started at the first launch, warm until the caller ends.
``spawn``: a fresh interpreter that serves one launch. ``fork``: a fork of the caller that serves one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mlaunch.base import linux
from mlaunch.base.errors import LaunchError, describe_exit
from mlaunch.caller.warn import warn_caller
from mlaunch.forkserver import main
from mlaunch.protocol import payload
from mlaunch.protocol.calls import Call
from mlaunch.protocol.channel import Channel
from mlaunch.protocol.messages import Cancel, CountDevices, DeviceCount, NotReady, Ready, Retire, StartLaunch
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.rank import process

_BOOTSTRAP = "import sys; sys.path[:] = sys.argv[3:]; from mlaunch.forkserver.main import main; main({}, {}, {})"
# Forking copies page tables, and torch fills a heap of 80 MiB. On huge pages a fork costs half.
_HUGE_HEAP = "glibc.malloc.hugetlb=1"

_open_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


class ForkServer:
    """A running fork server. ``wait(seconds)`` returns its exit code, or None if it lives on."""

    def __init__(self, control: Channel, pid: int, wait: Callable[[float], int | None]) -> None:
        self.pid = pid
        self._control = control
        self._wait = wait
        self._lock = threading.RLock()
        self._ready: Ready | None = None
        self._waiting = False
        self._launches: weakref.WeakSet[Channel] = weakref.WeakSet()
        _open_channels.add(control)

    def ready(self) -> Ready:
        """What its torch offers; waits for the import. LaunchError if it could not be imported."""
        with self._lock:
            if self._waiting:
                raise RuntimeError(
                    "a launch from a signal handler, while the same thread waits for the fork server to start; "
                    "call mlaunch.warm_up() early, or launch outside of the handler"
                )
            if self._ready is None:
                self._waiting = True
                try:
                    self._ready = self._hear()
                finally:
                    self._waiting = False
            return self._ready

    def _hear(self) -> Ready:
        try:
            record, _ = self._control.receive()
        except EOFError:
            raise LaunchError(f"{self.describe_end()} before it was ready") from None
        if isinstance(record, NotReady):
            raise LaunchError(
                f"the fork server (pid {self.pid}) could not import its modules:\n{record.traceback.rstrip()}"
            )
        if not isinstance(record, Ready):
            raise LaunchError(f"the fork server (pid {self.pid}) sent {record!r} where Ready was expected")
        return record

    def describe_end(self) -> str:
        """How the server, whose connection was found closed, came to its end."""
        exitcode = self._wait(5.0)
        died = "closed its connection" if exitcode is None else describe_exit(exitcode)
        return f"the fork server (pid {self.pid}) {died}"

    def alive(self) -> bool:
        return self._wait(0.0) is None

    def count_devices(self, environ: Mapping[str, str]) -> int:
        """The accelerators visible in ``environ``; counted in a process of its own, since it wakes the driver."""
        ours = self._ask(CountDevices(), [("environ", dict(environ))])
        try:
            answer, _ = ours.receive()
        except EOFError:
            answer = None
        finally:
            ours.close()
        if not isinstance(answer, DeviceCount):
            raise LaunchError(f"counting the accelerators failed: the counting process died ({answer!r})")
        if answer.error:
            raise LaunchError(f"counting the accelerators failed: {answer.error}")
        return answer.count

    def launch(self, spec: LaunchSpec, call: Call | None) -> Channel:
        """Starts a launch; the channel is to its agent. ``call`` None: the server has it in memory."""
        with _standard_streams() as streams:
            return self._ask(StartLaunch(), [("spec", spec), ("call", call)], streams)

    def _ask(self, record: object, values: Sequence[tuple[str, object]], extra: Sequence[int] = ()) -> Channel:
        memfds: list[int] = []
        ours, theirs = Channel.pair()
        _open_channels.add(ours)
        self._launches.add(ours)
        try:
            for name, value in values:
                memfds.append(payload.create(name))
                payload.write(memfds[-1], value)
            with self._lock:
                self._control.send(record, [*memfds, theirs.fileno(), *extra])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            main.close(memfds)
        return ours

    def retire(self) -> None:
        """Lets running launches end, then the server; does not wait."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.send(Retire())

    def close(self, patience: float = 10.0) -> None:
        """Ends the server and what still runs there (a daemon thread's launch, at the end of the interpreter)."""
        for launch in list(self._launches):
            launch.try_send(Cancel())
        self._control.close()
        self._wait(patience)


@contextlib.contextmanager
def _standard_streams():  # type: ignore[no-untyped-def]
    """Descriptors 1 and 2 of this moment, or /dev/null for one that is closed."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        yield [fd if _is_open(fd) else null for fd in (1, 2)]
    finally:
        os.close(null)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Interpreter:
    """What is to be different from this one: for commands, which have paths and a standard input of their own."""

    executable: str = field(default_factory=lambda: sys.executable)
    path: Sequence[str] = field(default_factory=lambda: sys.path)
    preload: Sequence[str] = ()  # modules to import once
    stdin: int | None = subprocess.DEVNULL  # None: ours


def start_interpreter(environ: Mapping[str, str], like: Interpreter | None = None) -> ForkServer:
    """A fork server in a fresh interpreter with the caller's flags and paths. Returns before torch is imported."""
    like = like or Interpreter()
    ours, theirs = Channel.pair()
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    code = _BOOTSTRAP.format(theirs.fileno(), os.getpid(), tuple(like.preload))
    tunables = [environ["GLIBC_TUNABLES"]] if "GLIBC_TUNABLES" in environ else []
    process = subprocess.Popen(
        [like.executable, *flags, "-c", code, "mlaunch-fork-server", str(os.getpid()), *like.path],
        env={**environ, "GLIBC_TUNABLES": ":".join([*tunables, _HUGE_HEAP])},
        stdin=like.stdin,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,  # a terminal's Ctrl-C and hang-up are the caller's to answer
    )
    theirs.close()

    def wait(seconds: float) -> int | None:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    return ForkServer(ours, process.pid, wait)


def start_fork(call: Call) -> ForkServer:
    """A fork of this process that serves one launch, with the call in memory."""
    _check_forkable()
    linux.give_back_openmp_threads()
    ours, theirs = Channel.pair()
    caller = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of threads: _check_forkable has said it
        pid = os.fork()
    if pid == 0:
        _become_server(ours, theirs, caller, call)
    theirs.close()
    return ForkServer(ours, pid, _Waiter(pid))


def _become_server(ours: Channel, theirs: Channel, caller: int, call: Call) -> None:
    try:
        ours.close()
        os.setsid()
        process.reset_process()
    except BaseException:
        os._exit(1)
    main.serve(theirs, caller, call)


class _Waiter:
    """Waits for a child that we forked, and remembers how it ended."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._exitcode: int | None = None

    def __call__(self, seconds: float) -> int | None:
        if self._exitcode is None and linux.wait_readable([self._pidfd], seconds):
            try:
                _, status = os.waitpid(self._pid, 0)
            except ChildProcessError:  # somebody in this process waits for any child
                status = 0
            self._exitcode = os.waitstatus_to_exitcode(status)
            os.close(self._pidfd)
        return self._exitcode


def _check_forkable() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and torch.get_device_module(accelerator).is_initialized():
            raise RuntimeError(
                f"start_method='fork': this process has initialised {accelerator.type}, and a fork of it could not "
                f"use the devices; use start_method='forkserver' (the default), which does not fork this process"
            )
    others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    if others:
        warn_caller(
            f"start_method='fork' in a process with {len(others)} other thread(s) ({', '.join(others[:5])}): a lock "
            f"that one of them holds now stays locked in the ranks; start_method='forkserver' has no such danger"
        )


def forget_inherited() -> None:
    """After a fork of the caller, in the child: the parent's servers and launches are not ours."""
    for channel in list(_open_channels):
        channel.close()


os.register_at_fork(after_in_child=forget_inherited)
