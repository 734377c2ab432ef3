"""``resume=``: a file with a line for each trial that is done, so that a sweep continues where it ended.

The first line names the function. A line is on the disk before its trial counts as done. If the machine failed during a
write, the last line is torn, and is cut off.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import json
import os
import pickle
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mlaunch.base.exceptions import misuse
from mlaunch.base.fds import close_in_forks
from mlaunch.caller.warn import warn_caller
from mlaunch.sweeps.caller.identity import identity_of

_KIND = {"kind": "mlaunch sweep"}
_HEAD = {"kind", "function", "source"}
Done = tuple[list[Any], float | None]  # the values of a trial, and the seconds that it took


class TrialKey(NamedTuple):
    """The identity of a trial: its arguments, and how many trials before it have the same ones."""

    arguments: str
    repeat: int = 0


def keys_of(arguments: Iterable[str]) -> list[TrialKey]:
    """Return the keys of trials that have these arguments, in their order."""
    count: Counter[str] = Counter()
    keys = []
    for some in arguments:
        keys.append(TrialKey(some, count[some]))
        count[some] += 1
    return keys


class TrialFile:
    """The file, locked while it is open: two sweeps would run the same trials. ``name``: the function's."""

    def __init__(self, path: str | os.PathLike[str], name: str, function: Callable[..., Any]) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise misuse(
                (ValueError if path == "" else TypeError)(f"resume={path!r}: allowed: the path of a file, or None")
            )
        self.path = os.path.abspath(path)
        identity = identity_of(function, name)
        self._name, self._holds = name, identity.holds
        self._head = {**_KIND, "function": identity.function, "source": identity.source}
        self._fd = -1
        self._records: dict[TrialKey, Mapping[str, Any]] = {}
        close_in_forks(self)  # they would keep it locked

    def look_up(self, keys: Sequence[TrialKey]) -> list[Done | None]:
        """Open the file unless it is open; return which of these trials are done, None for the others.

        Raises:
            ValueError: It is not such a file, of another function, damaged, or another sweep has it.
            PermissionError: It is somebody else's, or anybody may write to it: its contents are unpickled.
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
        # Not through a link: in a group's directory somebody else may have put one there, to a file of this user's.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY | os.O_NOFOLLOW
        try:
            return os.open(self.path, flags, 0o600)
        except OSError as error:
            why = "it is a link" if error.errno == errno.ELOOP else error.strerror
            what = f"resume={self.path!r} cannot be opened for writing: {why}; nothing was run"
            raise misuse(
                OSError(error.errno, f"{what}. Allowed: a file of your own, in a directory that exists")
            ) from None

    def _done(self, key: TrialKey) -> Done | None:
        record = self._records.get(key)
        if record is None:
            return None
        try:
            text = record.get("pickled")
            return pickle.loads(base64.b64decode(text)) if text else record["values"], record.get("seconds")
        except Exception as error:  # whatever a __setstate__ may raise
            raise self._wrong(f"what {key.arguments} returned cannot be unpickled ({type(error).__name__}: {error}); "
                              f"remove its line to run the trial again") from error  # fmt: skip

    def add(self, key: TrialKey, values: list[Any], seconds: float | None) -> None:
        """Add a trial that is done; it is on the disk when this returns. OSError if it cannot be written."""
        more = {name: value for name, value in (("repeat", key.repeat), ("holds", self._holds)) if value}
        self._write({"arguments": key.arguments, **more, "seconds": seconds, **_as_text(values)})

    def close(self) -> None:
        fd, self._fd, self._records = self._fd, -1, {}
        if fd >= 0:
            os.close(fd)

    def _lock(self) -> None:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise self._wrong("it is not a regular file")
        if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
            raise PermissionError(
                f"resume={self.path!r} belongs to uid {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, and "
                f"its contents are unpickled here; allowed: a file of your own that not everybody may write to"
            )
        try:
            # Not fcntl()'s kind of lock, which ends when this process closes any descriptor of the file.
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._wrong("another sweep has it open; wait for its end, or give another file") from None

    def _read(self) -> dict[TrialKey, Mapping[str, Any]]:
        # The descriptor that was checked: the name may be another file's now.
        with open(os.dup(self._fd), "rb") as file:
            file.seek(0)
            whole, end, torn = file.read().rpartition(b"\n")
        lines = whole.split(b"\n") if end else []
        if not lines and not _line(_KIND)[:-2].startswith(torn[: len(_line(_KIND)) - 2]):
            raise self._wrong("it is not a file of a sweep; nothing was written there")
        records = [self._parsed(number, line) for number, line in enumerate(lines, 1)]
        # Not of a trial that counts as done: its line was whole before.
        if torn:
            os.ftruncate(self._fd, len(whole + end))
        if not records:
            self._write(self._head)
            self._sync_directory()
        elif records[0]["source"] != self._head["source"]:
            who = self._name
            warn_caller(f"{who} has changed since {self.path} was begun; trials that are done there are not run again")
        return self._of_ours(records[1:])

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
            raise self._wrong(f"line {number} is not of a sweep; remove it, or give another file")
        if number == 1 and record["function"] != self._head["function"]:
            raise self._wrong(f"it is of {record['function']}, not of {self._head['function']}; give another file")
        return record

    def _of_ours(self, records: Sequence[Mapping[str, Any]]) -> dict[TrialKey, Mapping[str, Any]]:
        """Return the records of this very function, by trial: not of another partial or closure of it."""
        ours = [record for record in records if record.get("holds", "") == self._holds]
        if records and not ours:
            there, here = (holds or "nothing" for holds in (records[-1].get("holds"), self._holds))
            warn_caller(
                f"the trials that are done in {self.path} are not used, since they are of another function: it holds "
                f"{there} there, and {here} here"
            )
        return {TrialKey(record["arguments"], record.get("repeat", 0)): record for record in ours}

    def _write(self, record: Mapping[str, Any]) -> None:
        size, data = os.fstat(self._fd).st_size, _line(record)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            os.fsync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)  # the next record would be appended to a torn line
            raise

    def _sync_directory(self) -> None:
        # fsync(2) of a file does not write its name: a crash could lose a new file as a whole.
        fd = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _wrong(self, what: str) -> ValueError:
        return misuse(ValueError(f"resume={self.path!r}: {what}"))


def _as_text(values: list[Any]) -> dict[str, Any]:
    """Return the values as plain JSON if they come back from that unchanged; else pickled."""
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        # Compare pickles: by ==, a numpy.float64 or an IntEnum equals the plain number that JSON makes of it.
        if pickle.dumps(json.loads(json.dumps(values))) == pickle.dumps(values):
            return {"values": values}
    return {"pickled": base64.b64encode(pickle.dumps(values)).decode()}


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"
