"""``resume=``: a file with a line for each trial that is done, so that a sweep goes on where it was ended.

The first line says whose trials they are. A line is on the disk before its trial counts as done; one that was torn, by
a machine that failed, is the last, and is cut off.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import hashlib
import inspect
import json
import os
import pickle
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlaunch.base.misuse import misuse
from mlaunch.caller.warn import warn_caller

_KIND = {"kind": "mlaunch sweep"}
_HEAD = {"kind", "function", "source"}
Done = tuple[list[Any], float | None]  # the values of a trial, and the seconds that it took


class TrialFile:
    """Locked while it is open: two sweeps would each repeat what the other has done. ``name``: the function's."""

    def __init__(self, path: str | os.PathLike[str], name: str, function: Callable[..., Any]) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise misuse(
                (ValueError if path == "" else TypeError)(f"resume={path!r}: allowed: the path of a file, or None")
            )
        self._path = os.path.abspath(path)
        self._head = {**_KIND, "function": name, "source": _source(function)}
        self._fd = -1
        self._records: dict[str, Mapping[str, Any]] = {}

    def look_up(self, keys: Sequence[str]) -> list[Done | None]:
        """Opens the file, unless it is open; returns which of these trials are done, None for the others.

        Raises:
            ValueError: It is no such file, of another function, damaged, or another sweep has it.
            PermissionError: It is somebody else's, or all may write to it: what stands there is unpickled.
            OSError: It cannot be opened.
        """
        if self._fd >= 0:
            return [self._done(key) for key in keys]
        self._fd = self._opened()
        try:
            self._lock()
            self._records = self._read()
            return [self._done(key) for key in keys]
        except BaseException:
            self.close()
            raise

    def _opened(self) -> int:
        # Through no link: in a directory of a group somebody else may have left one, to a file of this user's.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY | os.O_NOFOLLOW
        try:
            return os.open(self._path, flags, 0o600)
        except OSError as error:
            why = "it is a link" if error.errno == errno.ELOOP else error.strerror
            what = f"resume={self._path!r} cannot be opened for writing: {why}; nothing was run"
            raise misuse(
                OSError(error.errno, f"{what}. Allowed: a file of your own, in a directory that is there")
            ) from None

    def _done(self, key: str) -> Done | None:
        record = self._records.get(key)
        if record is None:
            return None
        try:
            text = record.get("pickled")
            return pickle.loads(base64.b64decode(text)) if text else record["values"], record.get("seconds")
        except Exception as error:  # whatever a __setstate__ may raise
            raise self._wrong(f"what {key} returned cannot be unpickled ({type(error).__name__}: {error}); remove its "
                              f"line, and it is run again") from error  # fmt: skip

    def add(self, key: str, values: list[Any], seconds: float | None) -> None:
        """Adds a trial that is done; when this returns, it is on the disk. OSError where it cannot be."""
        self._write({"arguments": key, "seconds": seconds, **_as_text(values)})

    def close(self) -> None:
        fd, self._fd, self._records = self._fd, -1, {}
        if fd >= 0:
            os.close(fd)

    def _lock(self) -> None:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise self._wrong("it is no file")
        if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
            raise PermissionError(
                f"resume={self._path!r} belongs to uid {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, and "
                f"what stands there is unpickled here; allowed: a file of your own, that not all may write to"
            )
        try:
            # Not fcntl()'s kind of lock, which is gone as soon as this process closes any descriptor of the file.
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._wrong("another sweep has it; wait for its end, or give another file") from None

    def _read(self) -> dict[str, Mapping[str, Any]]:
        # Of what was looked at, and not by its name again, which may be another file's by now.
        with open(os.dup(self._fd), "rb") as file:
            file.seek(0)
            whole, end, torn = file.read().rpartition(b"\n")
        lines = whole.split(b"\n") if end else []
        if not lines and not _line(_KIND)[:-2].startswith(torn[: len(_line(_KIND)) - 2]):
            raise self._wrong("it is no file of a sweep; nothing was written there")
        records = [self._parsed(number, line) for number, line in enumerate(lines, 1)]
        # No line of a trial that counts as done: that is whole before anybody is told.
        if torn:
            os.ftruncate(self._fd, len(whole + end))
        if not records:
            self._write(self._head)
            self._sync_directory()
        elif records[0]["source"] != self._head["source"]:
            who = self._head["function"]
            warn_caller(f"{who} has changed since {self._path} was begun; what is done there is not run again")
        return {record["arguments"]: record for record in records[1:]}

    def _parsed(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if (
            not isinstance(record, dict)
            or not (_HEAD if number == 1 else {"arguments"}) <= record.keys()
            or (number > 1 and record.keys().isdisjoint({"values", "pickled"}))
        ):
            raise self._wrong(f"line {number} is none of a sweep's; remove it, or give another file")
        if number == 1 and record["function"] != self._head["function"]:
            raise self._wrong(f"it is of {record['function']}, not of {self._head['function']}; give another file")
        return record

    def _write(self, record: Mapping[str, Any]) -> None:
        size, data = os.fstat(self._fd).st_size, _line(record)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            os.fsync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)  # what follows would be the end of a torn line
            raise

    def _sync_directory(self) -> None:
        # To sync a file does not write its name (fsync(2)): a crash could lose the whole of a new one.
        fd = os.open(os.path.dirname(self._path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _wrong(self, what: str) -> ValueError:
        return misuse(ValueError(f"resume={self._path!r}: {what}"))


def canonical(arguments: Mapping[str, Any]) -> str:
    """Returns the arguments in a form that is the same for the same ones. TypeError for what has none."""
    return json.dumps({name: _plain(name, value) for name, value in arguments.items()}, sort_keys=True)


def _plain(name: str, value: Any) -> Any:
    # By type() and not isinstance(): a subclass may hold more than its number or text.
    if value is None or type(value) in {bool, int, float, str}:
        return value
    if type(value) is list:
        return [_plain(name, part) for part in value]
    if type(value) is tuple:
        return {"tuple": [_plain(name, part) for part in value]}
    if type(value) is dict:
        return {
            "dict": sorted(([_plain(name, key), _plain(name, part)] for key, part in value.items()), key=json.dumps)
        }
    if isinstance(value, os.PathLike):
        return {"path": os.fspath(value)}
    kind = type(value).__qualname__
    a = "an" if kind[0] in "AEIOUaeiou" else "a"
    raise misuse(TypeError(f"resume= with {name}=, {a} {kind}, which has no form by which a later sweep would know it; "
                           f"allowed: numbers, strings, paths, None, and lists, tuples and dicts of them"))  # fmt: skip


def _as_text(values: list[Any]) -> dict[str, Any]:
    """Returns them to be read by people, if they come back from that as they were; else pickled."""
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        # By their pickles: == takes a numpy.float64 or an IntEnum for the plain number that JSON makes of it.
        if pickle.dumps(json.loads(json.dumps(values))) == pickle.dumps(values):
            return {"values": values}
    return {"pickled": base64.b64encode(pickle.dumps(values)).decode()}


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _source(function: Callable[..., Any]) -> str:
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    except (OSError, TypeError):  # of a prompt, or not in Python
        return ""
