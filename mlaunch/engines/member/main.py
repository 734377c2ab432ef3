"""``python -m mlaunch.engines.member.main``: the program that an engine starts on each machine. See ``member.py``.

A member may be stopped (SIGSTOP) at any time, also in the second that its imports take. A stopped member reads nothing,
and would stay after its caller is gone. Slurm and ``mpirun`` end the processes that they have started; after ``ssh`` no
process on the machine would. So before anything else, a member forks a process that waits for the end of the member's
standard input and then continues the member.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import warnings
from typing import NoReturn

from mlaunch.base import linux
from mlaunch.base.own_process import name_process

_DELAY = 1.0  # seconds between two times that it is continued: it may be stopped again
# Signals that a scheduler sends to all processes of a job.
_OTHERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def watch(incoming: int) -> None:
    """Fork a process that watches this one, and ends with it. ``incoming``: this process's standard input."""
    member = os.pidfd_open(os.getpid())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, none of which the fork needs
        # A process: a member that is stopped cannot see the end of its input, and would hold the machine for good.
        pid = os.fork()
    if pid == 0:
        _live(incoming, member)
    os.setpgid(pid, pid)  # so a signal that stops the member's group does not stop this process
    os.close(member)


def _live(incoming: int, member: int) -> NoReturn:
    try:
        name_process("waker")
        for number in _OTHERS:
            signal.signal(number, signal.SIG_IGN)
        for fd in {*map(int, os.listdir("/proc/self/fd"))} - {incoming, member}:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(fd)
        _wake_at_the_end(incoming, member)
    finally:
        os._exit(0)


def _wake_at_the_end(incoming: int, member: int) -> None:
    poll = select.poll()
    poll.register(incoming, select.POLLRDHUP)
    poll.register(member, select.POLLIN)
    while member not in dict(poll.poll()):
        signal.pidfd_send_signal(member, signal.SIGCONT)
        linux.wait_readable([member], _DELAY)


if __name__ == "__main__":
    watch(0)
    from mlaunch.engines.member.member import main

    main()
