"""The files that a launch makes on disk: torch's error files, those of multiprocessing, and those of ``log_dir``."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import multiprocessing.process
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mlaunch.base import own_files
from mlaunch.base.exceptions import LaunchError
from mlaunch.base.own_files import make_file
from mlaunch.protocol.spec import LaunchSpec

# Error files, in which torch's ``record`` decorator writes why a process failed. They tell what a rank that runs no
# Python script of mlaunch's cannot: the exception in a program that it became or started.

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_LONGEST_ERROR = 1 << 20  # bytes: nobody reads a longer traceback


def error_file_of(spec: LaunchSpec, local_rank: int) -> str:
    """Return the path of one rank's error file; "" if the launch has none."""
    if spec.target is None:
        return ""
    return os.path.join(spec.target.error_dir, f"attempt_{spec.restarts.count}", str(local_rank), "error.json")


@contextlib.contextmanager
def with_error_directory(spec: LaunchSpec) -> Iterator[LaunchSpec]:
    """Make a directory for error files if the command names none.

    Runs in the agent, which outlives a killed command.
    """
    if spec.target is None or spec.target.error_dir:
        yield spec
        return
    # No TemporaryDirectory: each rank forked in here would remove it in its exit handlers.
    path = _own_error_directory(spec)
    os.mkdir(path, 0o700)
    try:
        yield dataclasses.replace(spec, target=dataclasses.replace(spec.target, error_dir=path))
    finally:
        own_files.remove_directory(path)


def error_directory_of(spec: LaunchSpec) -> str:
    """Return the directory that an agent makes for error files; "" if it makes none."""
    return _own_error_directory(spec) if spec.target is not None and not spec.target.error_dir else ""


def remove_error_directory(spec: LaunchSpec) -> None:
    """Remove the directory of an agent that was killed. Called by its launcher."""
    if directory := error_directory_of(spec):
        own_files.remove_directory(directory)


def _own_error_directory(spec: LaunchSpec) -> str:
    return os.path.join(spec.target.temporary if spec.target else "", f"mlaunch-run-{spec.launch_id}")


def copy_error_file(path: str, crash_fd: int) -> None:
    """Copy the rank's error file into its crash memfd if faulthandler wrote nothing there."""
    # Stacks of a crash are nearer to the cause: an error file may be about an earlier failure that the program has
    # survived.
    if not path or os.fstat(crash_fd).st_size:
        return
    # The rank decides what this path is, and the agent must not wait, for example for the writer of a FIFO.
    with contextlib.suppress(OSError), open(own_files.open_file(path, os.O_RDONLY), "rb") as file:
        os.write(crash_fd, file.read(_LONGEST_ERROR))


def parse_error(text: str) -> dict[str, Any] | None:
    """Return the record in an error file; None if its text is not a record."""
    try:
        record = json.loads(text)
        return record if isinstance(record, dict) and traceback_of_error(record) is not None else None
    except ValueError:
        return None


def traceback_of_error(record: Mapping[str, Any]) -> str | None:
    """Return a record's traceback, or else its message; None if it has neither."""
    message = record.get("message")
    try:
        return str(message if isinstance(message, str) else message["extraInfo"]["py_callstack"])  # type: ignore[index]
    except (LookupError, TypeError):
        return None


def new_error(message: str, traceback: str) -> dict[str, Any]:
    """Return a record as torch's ``record`` decorator would make it."""
    extra = {"py_callstack": traceback, "timestamp": str(int(time.time()))}
    return {"message": {"message": message, "extraInfo": extra}}


def write_error(path: str, record: Mapping[str, Any], exitcode: int | None) -> None:
    """Write a rank's record for the launcher that started this launch, with its exit code as torchrun does.

    May raise OSError.
    """
    message = record["message"]
    if exitcode and isinstance(message, dict):
        record = {**record, "message": {**message, "errorCode": exitcode}}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    fd = own_files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    with open(fd, "w", encoding="utf-8") as file:
        json.dump(record, file)


def pass_error_on(text: str, code: int, error: LaunchError | None = None) -> None:
    """Write the record of a failed rank, or else ``text``, for the launcher that started this one and asked for it.

    ``code``: an exit code, or minus a signal's number. OSError if the file cannot be written.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    known: Mapping[str, Any] = new_error(text.partition("\n")[0], text)
    if error is not None and error.failures:
        cause = error.failures[0]
        code = code if cause.exitcode is None else cause.exitcode
        where = "" if cause.late else cause.traceback  # if the stack was asked for, the text says more
        known = error.recorded or new_error(text.partition("\n")[0], where or text)
    write_error(path, known, code)


# The directory for multiprocessing's files, such as sockets of a data loader's workers. Without it, each process would
# make one of its own (``pymp-...``), which is left behind when a signal ends the process. It is made when a rank or a
# child of a rank first needs it. TMPDIR stays as it is: it has caches, torch.compile's too, and files that the next
# launch must find.


def temporary_directory_of(spec: LaunchSpec) -> str:
    """Return the path of the directory, which may not exist."""
    place = spec.context.environ.get("TMPDIR") or "/tmp"
    return os.path.join(place, f"mlaunch-{spec.launch_id}-{spec.rank_start}")


def remove_temporary(spec: LaunchSpec) -> None:
    """Remove the directory, if a rank has made it."""
    own_files.remove_directory(temporary_directory_of(spec))


def share_temporary(spec: LaunchSpec) -> None:
    """Make this process, a rank, and what multiprocessing starts from it use the directory."""
    process: Any = multiprocessing.process.current_process()
    process._config = _MultiprocessingConfig(process._config, temporary_directory_of(spec))


class _MultiprocessingConfig(dict[str, Any]):
    """The data of multiprocessing about this process. Each child gets a copy."""

    def __init__(self, known: dict[str, Any], path: str) -> None:
        super().__init__(known)
        self._path = path

    def get(self, key: str, default: Any = None) -> Any:
        if key == "tempdir":
            self._make()
        return super().get(key, default)

    def copy(self) -> dict[str, Any]:
        self._make()
        return dict(self)

    def _make(self) -> None:
        if "tempdir" in self:
            return
        try:
            os.mkdir(self._path, 0o700)
        except FileExistsError:  # another rank has made it
            if not own_files.is_own_directory(self._path):
                return
        except OSError:  # multiprocessing makes a directory of its own, or says why it cannot
            return
        self["tempdir"] = self._path


# The files of ``log_dir``, one per attempt, rank and stream: DIRECTORY/attempt_0/RANK/stdout.log

NAMES = {1: "stdout.log", 2: "stderr.log"}


class LogFile:
    """A file, made with its directory at the first byte.

    If it cannot be written, that is reported once, and what follows is not kept.
    """

    def __init__(self, directory: str, attempt: int, rank: int, stream: int, complain: Callable[[str], None]) -> None:
        self.path = os.path.join(directory_of(directory, attempt, rank), NAMES[stream])
        self._place = directory, _parts(attempt, rank), NAMES[stream]
        self._complain = complain
        self._file: BinaryIO | None = None
        self._closed = False

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            if not self._closed and self._file is None:
                # Unbuffered: what a rank printed before it died is in the file at once. Not by its path: a user who
                # may rename in log_dir could have put a link, or a directory, in the way.
                self._file = open(make_file(*self._place), "wb", buffering=0)  # noqa: SIM115 - close() ends it
            while self._file is not None and left:
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file; later writes are dropped."""
        self._closed = True
        if self._file is not None:
            self._file.close()
        self._file = None

    def _give_up(self, error: OSError) -> None:
        self._complain(f"{self.path} cannot be written ({error.strerror}): what this rank prints now is not kept there")
        self.close()


def new_directory(base: str | os.PathLike[str], name: str) -> str:
    """Make a directory for one launch in ``base``; its name starts with ``name``. OSError if it cannot be made."""
    return tempfile.mkdtemp(prefix=_prefix(name), dir=_made(base))


def own_directory(base: str | os.PathLike[str], name: str) -> str:
    """Return a path like ``new_directory``'s; a call's first file makes it, since most calls print nothing."""
    base = _made(base)
    if not os.access(base, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return os.path.join(base, _prefix(name) + os.urandom(6).hex())


def kept(directory: str | None) -> str | None:
    """Return the directory if something was written there; else None."""
    return directory if directory is not None and os.path.isdir(directory) else None


def _made(base: str | os.PathLike[str]) -> str:
    base = os.path.abspath(os.fspath(base))
    os.makedirs(base, exist_ok=True)
    return base


def _prefix(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-") + "_"


def directory_of(directory: str, attempt: int, rank: int) -> str:
    """Return the directory of one rank's files."""
    return os.path.join(directory, *_parts(attempt, rank))


def _parts(attempt: int, rank: int) -> tuple[str, str]:
    return f"attempt_{attempt}", str(rank)
