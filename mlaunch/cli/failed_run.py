"""What ``mlaunch run`` leaves of a launch that failed: an exit status, and a record for whoever started the command."""

from __future__ import annotations

import os

from mlaunch.base.exceptions import LaunchError
from mlaunch.protocol import error_file

_RAISED, _SIGNALLED = 1, 128  # exit statuses


def record(error: LaunchError) -> None:
    """Writes what the rank wrote of its failure, or else what we know, for what started this command and asked.

    OSError: it cannot be written.
    """
    path = os.environ.get(error_file.VARIABLE)
    if path and error.failures:
        cause, first_line = error.failures[0], str(error).partition("\n")[0]
        known = error.recorded or error_file.new_record(first_line, cause.traceback or str(error))
        error_file.write(path, known, cause.exitcode)


def status_of(error: LaunchError) -> int:
    """Returns the exit status of the rank that failed first, as a shell tells it."""
    code = error.failures[0].exitcode if error.failures else None
    if code is None:
        return _RAISED
    return code if code > 0 else _SIGNALLED - code
