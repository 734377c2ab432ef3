"""The start of fork servers.

``forkserver``: one per caller process, started at the first launch, warm until the caller ends.
``spawn``: a new interpreter that serves one launch. ``fork``: a fork of the caller that serves one.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from mlaunch.base import linux
from mlaunch.base.fds import KeptFd, in_forks
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.unfollowed import not_followed, stay_unfollowed
from mlaunch.caller.report.user_frames import warn_caller
from mlaunch.caller.server.fork_server import ForkServer
from mlaunch.protocol import by_value
from mlaunch.protocol.calls import Call
from mlaunch.protocol.channel import Channel

if TYPE_CHECKING:
    from mlaunch.protocol.server_messages import ServerHears, ServerSays

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
    from mlaunch.rank.setup import process

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
    from mlaunch.rank.setup import process

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
        from mlaunch.rank.setup import device

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
