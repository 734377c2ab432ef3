"""``resume=``: a file with a line for each trial that is done, so that a sweep continues where it ended.

The first line names the function. A line is on the disk before its trial counts as done. If the machine failed during a
write, the last line is torn, and is cut off.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import errno
import fcntl
import functools
import hashlib
import inspect
import json
import numbers
import os
import pickle
import stat
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlaunch.base.exceptions import misuse
from mlaunch.base.fds import close_in_forks
from mlaunch.caller.report.user_frames import warn_caller

_KIND = {"kind": "mlaunch sweep"}
_HEAD = {"kind", "function", "source"}
_SHOWN = 300  # characters of what a function holds that a file shows
_NUMBERS = {"builtins", "decimal", "fractions", "numpy"}  # modules whose numbers say all of themselves
_ALLOWED = "numbers, strings, paths, None, members of enumerations, dtypes, and lists, tuples and dicts of them"
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
            raise self._wrong("it is not a sweep's file; nothing was written to it")
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
            raise self._wrong(f"line {number} was not written by a sweep; remove it, or give another file")
        if number == 1 and record["function"] != self._head["function"]:
            raise self._wrong(f"it belongs to {record['function']}, not to {self._head['function']}; give another file")
        return record

    def _of_ours(self, records: Sequence[Mapping[str, Any]]) -> dict[TrialKey, Mapping[str, Any]]:
        """Return the records of this very function, by trial: not of another partial or closure of it."""
        ours = [record for record in records if record.get("holds", "") == self._holds]
        if records and not ours:
            there, here = (holds or "nothing" for holds in (records[-1].get("holds"), self._holds))
            warn_caller(
                f"the finished trials in {self.path} are not used, since their function held other values: {there} "
                f"there, {here} here"
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


# Forms of a function and its arguments by which the file finds them again, the same in any process. What has no such
# form is refused: values of another function would silently be taken for this one's.


@dataclass(frozen=True)
class Identity:
    """The identity of a function. ``holds``: what it has beside its code, or ""; ``source``: a hash of the code."""

    function: str  # "train.evaluate", with its module
    holds: str
    source: str


def canonical(arguments: Mapping[str, Any]) -> str:
    """Return the arguments in a form that is the same for the same ones. TypeError for what has none."""
    forms = {name: _Forms(f"{name}=").of_value(value) for name, value in arguments.items()}
    return json.dumps(forms, sort_keys=True)


def identity_of(function: Callable[..., Any], name: str) -> Identity:
    """Return what identifies a function. TypeError if it holds something that has no form.

    Two partials of one function, two closures or two objects of a class with ``__call__`` differ only in what they
    hold.
    """
    forms = _Forms(f"{name}(), which holds ", code=True)
    form = forms.of(function)
    held = json.dumps(form, sort_keys=True)
    if form == {"code": forms.names[0]}:  # not a lambda, whose name says nothing
        held = ""
    elif len(held) > _SHOWN:
        held = f"{held[:_SHOWN]}... {_hash(held)}"
    return Identity(forms.names[0], held, _hash("\n".join(forms.sources)))


class _Forms:
    """The maker of the forms of one thing and of what it holds.

    ``whose``: its name in errors; ``code``: functions, classes and objects have a form, too.
    """

    def __init__(self, whose: str, *, code: bool = False) -> None:
        self._whose, self._code = whose, code
        self._met: dict[int, tuple[int, object]] = {}  # by ID, with the object, so that no other gets the ID
        self.names: list[str] = []  # of functions and classes, as they are met
        self.sources: list[str] = []

    def of(self, value: Any) -> dict[str, Any]:
        """Return the form of code, or of an object."""
        if id(value) in self._met:
            return {"again": self._met[id(value)][0]}
        self._met[id(value)] = len(self._met), value
        if isinstance(value, functools.partial):
            held = {**{str(number): arg for number, arg in enumerate(value.args)}, **value.keywords}
            return {"partial of": self.of(value.func), **self._parts(held)}
        if isinstance(value, types.MethodType):
            return {"method": self.of(value.__func__), **self._parts({"self": value.__self__})}
        if _is_code(value):
            held = _held_by(value, whole=len(self._met) > 1) if isinstance(value, types.FunctionType) else {}
            return {"code": self._code_of(value), **self._parts(held)}
        return self.of(value.__wrapped__) if _is_only_a_wrapper(value) else self._of_object(value)

    def of_value(self, value: Any) -> Any:
        # By type() and not isinstance(): a subclass may hold more than its number or text.
        if value is None or type(value) in {bool, int, float, str}:
            return value
        if type(value) in {list, tuple, dict}:
            return self._of_parts(value)
        if isinstance(value, os.PathLike):
            return {"path": os.fspath(value)}
        if isinstance(value, enum.Enum) or says_all_of_itself(value):
            return {_name_of(type(value)): self.of_value(value.value) if isinstance(value, enum.Enum) else str(value)}
        if not self._code:
            raise self._no_form(value)
        return {"module": value.__name__} if isinstance(value, types.ModuleType) else self.of(value)

    def _of_parts(self, value: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> Any:
        if isinstance(value, dict):
            pairs = [[self.of_value(key), self.of_value(part)] for key, part in value.items()]
            return {"dict": sorted(pairs, key=json.dumps)}
        parts = [self.of_value(part) for part in value]
        return parts if isinstance(value, list) else {"tuple": parts}

    def _of_object(self, value: Any) -> dict[str, Any]:
        """Return the form of an instance: what pickle would keep of it."""
        kind = type(value)
        if any(getattr(kind, name) is not getattr(object, name) for name in ("__reduce__", "__reduce_ex__")):
            raise self._no_form(value)
        try:
            _, args, *states = value.__reduce_ex__(2)
        except Exception:  # a lock, a file; what a __getstate__ may raise
            raise self._no_form(value) from None
        state, items, pairs = (*states, None, None, None)[:3]
        form = {"object of": self.of(kind)}
        if isinstance(state, dict) and not (args[1:] or items or pairs):
            return {**form, **self._parts({str(name): part for name, part in state.items()})}
        return {**form, "parts": self.of_value([list(args[1:]), state, list(items or ()), list(pairs or ())])}

    def _parts(self, held: Mapping[str, Any]) -> dict[str, Any]:
        whose, forms = self._whose, {}
        for name, value in held.items():
            self._whose = f"{whose.rpartition(' ')[0]} {name}"
            forms[name] = self.of_value(value)
        self._whose = whose
        return forms

    def _code_of(self, found: Any) -> str:
        """Note name and source; return the name, for a lambda with its source, which alone identifies it."""
        source = _source(found)
        self.names.append(_name_of(found))
        self.sources.append(source)
        return f"{self.names[-1]} {source}" if "<lambda>" in self.names[-1] else self.names[-1]

    def _no_form(self, value: Any) -> TypeError:
        kind = type(value).__qualname__
        a = "an" if kind[0] in "AEIOUaeiou" else "a"
        return misuse(TypeError(f"resume= with {self._whose}, {a} {kind}, which has no form by which a later sweep "
                                f"could find it again; allowed: {_ALLOWED}"))  # fmt: skip


def says_all_of_itself(value: object) -> bool:
    """True for numbers of any kind, dtypes and devices, which their ``str`` describes fully."""
    if isinstance(value, numbers.Number) and type(value).__module__ in _NUMBERS:
        return True
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")  # else there is no such value
    kinds = (numpy.generic, numpy.dtype) if numpy else ()
    return isinstance(value, kinds + ((torch.dtype, torch.device) if torch else ()))


def _held_by(function: types.FunctionType, *, whole: bool) -> dict[str, Any]:
    """Return what a function holds, by name: its closure; with ``whole`` also defaults, which else are arguments."""
    held: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # it is assigned later
            held[name] = None
    if whole and (function.__defaults__ or function.__kwdefaults__):
        held["its defaults"] = [list(function.__defaults__ or ()), function.__kwdefaults__]
    return held


def _is_code(value: object) -> bool:
    """True for functions and classes, also those of C that are a module's or a class's."""
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, types.ModuleType | type)
    return isinstance(value, types.FunctionType | type)


def _is_only_a_wrapper(value: Any) -> bool:
    """True for decorated functions (``launcher``) and caches, which do not change what is returned."""
    return hasattr(value, "__wrapped__") and type(value).__module__.partition(".")[0] in {"mlaunch", "functools"}


def _name_of(found: Any) -> str:
    """Return the name with its module; a script's is the same whether it is run or imported."""
    module = found.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        file = os.path.basename(getattr(main, "__file__", None) or module)
        module = getattr(getattr(main, "__spec__", None), "name", None) or os.path.splitext(file)[0]
    return f"{module}.{found.__qualname__}"


def _source(found: Any) -> str:
    """Return a hash of the code; "" if it is not in Python."""
    code = getattr(found, "__code__", None)
    compiled = "" if code is None else _compiled(code)
    try:
        text = inspect.getsource(found if code is None else code)  # its own, not that of what it wraps
    except (OSError, TypeError):  # from a prompt, or not in Python
        return _hash(compiled) if compiled else ""
    # One line may contain many lambdas.
    return _hash(text + compiled if found.__name__ == "<lambda>" else text)


def _compiled(code: types.CodeType) -> str:
    constants = [
        _compiled(one) if isinstance(one, types.CodeType) else sorted(map(repr, one)) if type(one) is frozenset
        else repr(one) for one in code.co_consts
    ]  # fmt: skip
    return f"{code.co_code.hex()} {code.co_names} {code.co_freevars} {constants}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
