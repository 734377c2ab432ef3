"""The output of ``mlaunch run``, by its flags ``--redirects``, ``--tee``, ``--local-ranks-filter``, ``--log-dir``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import string
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlaunch.base.exceptions import LaunchError, failure_of_text
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.text import without_escapes
from mlaunch.caller.output import files
from mlaunch.caller.output.output_plan import STREAMS, OutputPlan, Policy
from mlaunch.cli.checks import UsageError, numbers
from mlaunch.core import load
from mlaunch.protocol import launch_files
from mlaunch.run.command.statuses import MISUSE, SIGNALLED, STOPPED

_PREFIX = "[${role_name}${local_rank}]:"  # torchrun's
_PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


@frozen_record
class Wishes:
    """The flags. ``redirects``, ``tee``: streams of a local rank (bits 1 and 2). ``only``: None shows all ranks."""

    redirects: Callable[[int], int]
    tee: Callable[[int], int]
    only: frozenset[int] | None
    log_dir: str | None
    prefix: str  # a template

    @property
    def own_prefix(self) -> bool:
        """True if the prefix is not torchrun's."""
        return self.prefix != _PREFIX

    def prefix_of(self, role: str, rank: int, local_rank: int, host: str) -> str:
        """Return the prefix of a rank's lines."""
        template = string.Template(self.prefix)
        return template.safe_substitute(role_name=role, rank=rank, local_rank=local_rank, hostname=host)

    def policies(self, size: int) -> dict[tuple[int, int], Policy]:
        """Return the policies of streams that pass through this process."""
        found = {}
        for local_rank in range(size):
            hidden = self.only is not None and local_rank not in self.only
            for stream in STREAMS:
                teed = bool(self.tee(local_rank) & stream)
                if teed or self.redirects(local_rank) & stream:
                    found[local_rank, stream] = Policy(shown=teed and not hidden, kept=True)
                elif hidden:
                    found[local_rank, stream] = Policy(shown=False)
        return found


def wishes_of(args: argparse.Namespace, environ: Mapping[str, str]) -> Wishes:
    only = None
    if args.local_ranks_filter:
        only = frozenset(numbers("--local-ranks-filter", args.local_ranks_filter))
    redirects, tee = _of_rank("--redirects", args.redirects), _of_rank("--tee", args.tee)
    prefix = args.log_line_prefix_template or environ.get(_PREFIX_VARIABLE) or _PREFIX
    return Wishes(redirects, tee, only, args.log_dir, prefix)


def _of_rank(name: str, text: str) -> Callable[[int], int]:
    """Read "3" or "0:3,1:2"."""
    if re.fullmatch("[0-3]", text):
        return lambda _local_rank: int(text)
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise UsageError(f"{name} {text}: allowed: 0, 1, 2 or 3, or one of them for each of some local ranks: 0:3,1:2")
    pairs = (pair.split(":") for pair in text.split(","))
    wanted = {int(local_rank): int(streams) for local_rank, streams in pairs}
    return lambda local_rank: wanted.get(local_rank, 0)


def directory_of(wishes: Wishes, size: int, run_id: str) -> str | None:
    """Return a new directory for the files of this run; None if it writes none. UsageError if it cannot be made."""
    if wishes.log_dir is None and not any(policy.kept for policy in wishes.policies(size).values()):
        return None
    try:
        return files.new_directory(wishes.log_dir or tempfile.mkdtemp(prefix="mlaunch-logs-"), run_id)
    except OSError as error:
        raise UsageError(f"--log-dir {wishes.log_dir or tempfile.gettempdir()}: {error.strerror}") from None


def without_output(wishes: Wishes, size: int) -> str:
    """Return a message if no output is kept in the given directory; else ""."""
    if wishes.log_dir is None or any(policy.kept for policy in wishes.policies(size).values()):
        return ""
    return f"--log-dir {wishes.log_dir} keeps no output without --tee 3 (here, too) or --redirects 3 (there alone)"


def output_plan(
    wishes: Wishes, size: int, role: str, directory: str | None, rank_start: Callable[[], int]
) -> OutputPlan:
    """Make the plan. ``rank_start`` is called when ranks print: a machine gets its first rank from the others."""
    host = socket.gethostname()

    def prefix(ranks: Sequence[int]) -> str:
        (rank,) = ranks
        return wishes.prefix_of(role, rank, rank - rank_start(), host)

    return OutputPlan(wishes.policies(size), prefix, directory, by_local_rank=True, merge=False)


class ErrorFile:
    """The file of ``--error-file``: why this command failed, for programs. It exists only if the command failed."""

    def __init__(self) -> None:
        self._path: str | None = None

    def begin(self, path: str | None) -> None:
        """Remove the file of an earlier run; ``check`` refuses a path where no file can be."""
        self._path = path if path is not None and _may_be_file(path) else None
        if self._path is not None and os.path.isfile(self._path):
            os.unlink(self._path)

    def check(self, path: str | None) -> None:
        if path is not None and not _may_be_file(path):
            raise UsageError(f"--error-file {path}: allowed: the path of a file, in a directory that is there")

    def write(self, failure: Mapping[str, Any]) -> None:
        if self._path is not None:
            try:
                Path(self._path).write_text(json.dumps(failure, indent=2) + "\n", encoding="utf-8")
            except OSError as problem:
                say(f"--error-file {self._path}: {problem}")


errors = ErrorFile()


def _may_be_file(path: str) -> bool:
    return os.path.isdir(os.path.dirname(path) or ".") and not os.path.isdir(path)


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
