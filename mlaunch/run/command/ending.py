"""How ``mlaunch run`` ends: its exit status, and why it has failed, for people and for programs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlaunch.base.exceptions import LaunchError, failure_of_text
from mlaunch.base.text import without_escapes
from mlaunch.cli import UsageError
from mlaunch.core import load
from mlaunch.protocol import launch_files

# Exit statuses: each means one thing and stays. docs/command.rst has the table.

FAILED = 1
MISUSE = 2  # as argparse's
OUT_OF_MEMORY = 52  # as Spark's
STOPPED = 75  # as agreed; EX_TEMPFAIL of sysexits.h: try again later
NO_PROGRESS = 93  # as NVIDIA's ft_launcher: a scheduler should not requeue the job
TIMED_OUT = 124  # as timeout(1)
SIGNALLED = 128  # + the signal's number, as in a shell

_START = 64  # bytes, in which an error file shows what it is, even one that a full disk has cut

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


class ErrorFile:
    """The file of ``--error-file``: why this command failed, for programs. It exists only if the command failed."""

    def __init__(self) -> None:
        self._path: str | None = None

    def begin(self, path: str | None) -> None:
        """Remove the file of an earlier run; ``check`` refuses a path where no file can be, or another one is."""
        self._path = path if path is not None and _may_be_file(path) and not _is_foreign(path) else None
        if self._path is not None and os.path.isfile(self._path):
            os.unlink(self._path)

    def check(self, path: str | None) -> None:
        if path is not None and not _may_be_file(path):
            raise UsageError(f"--error-file {path}: allowed: the path of a file, in a directory that is there")
        if path is not None and _is_foreign(path):
            raise UsageError(f"--error-file {path}: this file is there, and is not the error file of an earlier run; "
                             f"give another path")  # fmt: skip

    def write(self, failure: Mapping[str, Any]) -> None:
        if self._path is not None:
            try:
                Path(self._path).write_text(json.dumps(failure, indent=2) + "\n", encoding="utf-8")
            except OSError as problem:
                say(f"--error-file {self._path}: {problem}")


errors = ErrorFile()


def _may_be_file(path: str) -> bool:
    return os.path.isdir(os.path.dirname(path) or ".") and not os.path.isdir(path)


def _is_foreign(path: str) -> bool:
    """True if another file is there, which must stay: ``--error-file train.py``, where the value was left out."""
    try:
        with open(path if os.path.isfile(path) else os.devnull, "rb") as file:
            start = file.read(_START)
    except OSError:
        return True
    return bool(start.strip()) and not start.startswith(b'{\n  "schema": ')


def fail(text: str, code: int, error: LaunchError | None = None, status: int | None = None) -> None:
    """Report why the command fails, to people and to its starter; the arguments are those of ``note_error``."""
    say(text)
    note_error(text, code, error, status)


def annotate(error: LaunchError) -> None:
    """Have the CI service that runs this command show the failure beside its line of code."""
    service = load.at_hand("ci", "caller")
    if service is not None and service.is_asked():
        with contextlib.suppress(OSError):
            print(service.of_launch(error.as_dict()), file=sys.stderr, flush=True)


def note_error(text: str, code: int, error: LaunchError | None = None, status: int | None = None) -> None:
    """Write why the command fails to the files that were asked for: ``TORCHELASTIC_ERROR_FILE``, ``--error-file``.

    ``code``: the exit status, or minus the number of the signal that ended it. ``status``: the exit status, if it is
    another.
    """
    kind = {MISUSE: "misuse", STOPPED: "stopped_as_agreed"}.get(code, "interrupted" if code < 0 else "not_started")
    known = failure_of_text(kind, text) if error is None else error.as_dict()
    ends_with = status if status is not None else code if code >= 0 else SIGNALLED - code
    errors.write({**known, "status": ends_with})
    try:
        launch_files.pass_error_on(text, code, error)
    except OSError as problem:
        say(f"{launch_files.ERROR_FILE}={os.environ.get(launch_files.ERROR_FILE)}: {problem}")


def say(text: str) -> None:
    """Print a message on stderr."""
    with contextlib.suppress(OSError):
        shown = text if sys.stderr is not None and sys.stderr.isatty() else without_escapes(text)
        print(f"mlaunch: {shown}", file=sys.stderr, flush=True)
