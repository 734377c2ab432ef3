"""The exit statuses of ``mlaunch run``. Each means one thing and stays; ``docs/command.rst`` has the table."""

from __future__ import annotations

import signal

from mlaunch.base.exceptions import LaunchError

FAILED = 1
MISUSE = 2  # as argparse's
OUT_OF_MEMORY = 52  # as Spark's
STOPPED = 75  # as agreed; EX_TEMPFAIL of sysexits.h: try again later
NO_PROGRESS = 93  # as NVIDIA's ft_launcher: a scheduler should not requeue the job
TIMED_OUT = 124  # as timeout(1)
SIGNALLED = 128  # + the signal's number, as in a shell

_OF_KIND = {
    "out_of_memory": OUT_OF_MEMORY,
    "no_progress": NO_PROGRESS,
    "deadline": TIMED_OUT,
    "stop_overdue": TIMED_OUT,
    "stopped": SIGNALLED + signal.SIGTERM,
}


def status_of(error: LaunchError) -> int:
    """Return the exit status for a failure: of its kind, or the rank's own."""
    if error.kind in _OF_KIND:
        return _OF_KIND[error.kind]
    code = error.failures[0].exitcode if error.failures else None
    if code is None:
        return FAILED
    return code if code > 0 else SIGNALLED - code
