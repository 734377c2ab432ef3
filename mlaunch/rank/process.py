"""A forked process becomes like a new interpreter, for the code of a user, and ends like one.

It gets signals, streams that write whole lines, variables, ``__main__`` and ``breakpoint()``.

Features stand in for modules that only a notebook's own process can use. Such a feature's ``rank.py`` has
``spec_of(name, path)``, the spec of a module to be imported in place of that (None: that one itself), and
``change(module)`` for one that has been imported already.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal wraps in enumerations, which take 50 times as long
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib.abc
import importlib.machinery
import inspect
import io
import logging
import multiprocessing.process
import multiprocessing.util
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from select import PIPE_BUF  # bytes that a pipe takes without another's in between
from typing import Any, TextIO

import cloudpickle.cloudpickle

from mlaunch.base.fds import in_forks
from mlaunch.features import FEATURES
from mlaunch.protocol.spec import Context

_TEMPORARY = ("TMPDIR", "TEMP", "TMP")  # where tempfile looks
_libc = ctypes.CDLL(None)
_INHERITED_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
_bare: list[object] = []  # the latest function and the ``__main__`` made for it, if nothing of the caller's came along
_FEATURES = {module: feature.name for feature in FEATURES for module in feature.stands_in}


def _plain(fd: int) -> io.FileIO:
    return io.FileIO(fd, "wb", closefd=False)


def reset_process(
    *, of_a_function: bool = True, open_stream: Callable[[int], io.FileIO] = _plain, own_handlers_only: bool = False
) -> None:
    """Give a forked process the signals, streams, exit handlers and collector of a new interpreter.

    A command keeps the exit handlers of the modules that were imported for it, and chooses its streams.
    ``own_handlers_only``: of logging's handlers, close only those made from now on at the end. Those of a fork server
    are torch's, which hold nothing, and closing its 40 takes longer than a small function.
    """
    signal.set_wakeup_fd(-1)  # the caller's event loop would get a byte for each signal of this rank
    for number in _INHERITED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Last, when a signal that was held back can no longer run an inherited handler.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]  # which are the caller's
    if of_a_function:
        atexit._clear()
        inherited = list(logging._handlerList) if own_handlers_only else []  # type: ignore[attr-defined]
        atexit.register(_shut_down_logging, inherited)
        if getattr(sys.stdin, "name", None) == os.devnull:  # of the process that we were forked from
            sys.stdin.close()
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - it lives as long as the process
        sys.stdout, sys.stderr = _by_lines(open_stream(1)), _by_lines(open_stream(2))
    gc.enable()  # the fork server has disabled it for its imports


def _shut_down_logging(inherited: list[object]) -> None:
    known = set(map(id, inherited))
    logging.shutdown([reference for reference in logging._handlerList if id(reference) not in known])  # type: ignore[attr-defined]


def leave_to_caller(numbers: Sequence[int]) -> None:
    """Ignore these signals here, which a scheduler may send to all processes of a job.

    Forks block them, since a data loader's workers set handlers of their own. So does the process that multiprocessing
    starts for its workers: a data loader's are forks of it from Python 3.14 on. Other programs get the defaults.
    """
    for number in numbers:
        signal.signal(number, _do_nothing)
    if numbers:
        in_forks(lambda: _signal.pthread_sigmask(signal.SIG_BLOCK, numbers))
        # Multiprocessing starts its fork server and its resource tracker through this.
        start = multiprocessing.util.spawnv_passfds
        vars(multiprocessing.util)["spawnv_passfds"] = functools.partial(_start_blocking, numbers, start)


def _start_blocking(numbers: Sequence[int], start: Callable[..., int], *args: Any) -> int:
    """Start a program that blocks these signals, as all its children will."""
    before = _signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        return start(*args)
    finally:
        _signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _do_nothing(_number: int, _frame: object) -> None:
    pass


@contextlib.contextmanager
def noting_variables() -> Iterator[None]:
    """Note the variables that are set or removed inside, where modules are imported for processes to come."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            _set_by_imports[name] = before.get(name), after.get(name)


def _after_imports(wanted: dict[str, str]) -> dict[str, str]:
    """Return the variables as the imported modules would have left them, if they had been imported under these."""
    # Only where the module has met the same value: it may leave others as they are.
    changed = {name: after for name, (before, after) in _set_by_imports.items() if wanted.get(name) == before}
    found: dict[str, str | None] = {**wanted, **changed}
    return {name: value for name, value in found.items() if value is not None}


_set_by_imports: dict[str, tuple[str | None, str | None]] = {}


def set_environ(wanted: dict[str, str]) -> None:
    """Replace the whole environment; the time zone and the directory of temporary files follow."""
    wanted = _after_imports(wanted) if _set_by_imports else wanted
    zone, places = os.environ.get("TZ"), list(map(os.environ.get, _TEMPORARY))
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:  # each change is a call of putenv
            os.environ[name] = value
    if zone != wanted.get("TZ"):
        time.tzset()
    if "tempfile" in sys.modules and places != list(map(wanted.get, _TEMPORARY)):
        vars(sys.modules["tempfile"])["tempdir"] = None  # its first answer, asked for before the fork


def _by_lines(file: io.FileIO) -> TextIO:
    # By lines: those of several ranks do not mix, and a killed rank's last ones are not lost.
    return Text(WholeLines(file), encoding="utf-8", errors="backslashreplace", write_through=True)


def flush() -> None:
    """Flush the standard streams, Python's and C's."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # None, a full disk, closed, what a user's stream raises: there is nobody to report it to
            continue
    # C++ of extensions prints through C's buffers, which os._exit drops.
    _libc.fflush(None)


def fill_streams() -> None:
    """Open standard streams that are closed on /dev/null: the next file that is opened would take their numbers."""
    for fd in (0, 1, 2):
        try:
            os.get_inheritable(fd)  # the cheapest question; each call on ranks that stay asks
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free


def exit_code(leaving: SystemExit) -> int:
    """Return the status of an interpreter for sys.exit(...), after printing what it prints."""
    if leaving.code is None or isinstance(leaving.code, int):
        return (leaving.code or 0) & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


# Standard streams


class WholeLines(io.BufferedWriter):
    """A buffer that writes lines when they are complete, and holds back what follows the last newline.

    ``print("a\\nb")`` arrives as two pieces, ``a\\nb`` and a newline: if ``b`` were written with the first, another
    rank's line could come between it and its end. A line with a carriage return (``\\r``) is shown at once, as by
    ``line_buffering``.
    """

    _held = 0  # bytes
    _aside = b""  # from a signal handler, to be written before anything else

    def write(self, data: Any) -> int:
        """Write the complete lines; return the number of bytes taken, which is all.

        A signal handler may call this while its thread is inside, waiting for a reader.
        """
        given = bytes(data)
        taken, self._aside = self._aside + given, b""
        end = _end_of_lines(taken)
        try:
            self._write(taken, end)
        except RuntimeError as error:
            if not _is_reentrant(error):
                raise
            # If a pipe takes the waiting piece at once, the kernel has taken all of it or nothing: this comes before or
            # after it, not in between.
            self._aside = taken[end:]
            self._write_past(memoryview(taken)[:end])
        return len(given)

    def flush(self) -> None:
        """Write everything; in a signal handler that interrupts a write of its thread, only the handler's own."""
        if not self._held and not self._aside:  # as after most calls
            return
        aside, self._aside = self._aside, b""
        try:
            if aside:
                super().write(aside)
            super().flush()
            self._held = 0
        except RuntimeError as error:
            if not _is_reentrant(error):
                raise
            self._write_past(memoryview(aside))

    def _write(self, taken: bytes, end: int) -> None:
        # A pipe takes up to PIPE_BUF bytes at once; into a longer write, another rank's may come.
        for piece in _pieces(taken[:end], PIPE_BUF - self._held):
            self._held += len(piece)  # until it is flushed: a handler that raises leaves it here
            super().write(piece)
            self.flush()
        if end < len(taken):
            self._held += len(taken) - end
            super().write(taken[end:])

    def _write_past(self, data: memoryview) -> None:
        """Write past the buffer, and its lock, which refuses the thread that has it already."""
        while data:
            written = self.raw.write(data)
            if not written:  # the file does not wait for its reader
                self._aside = bytes(data) + self._aside
                return
            data = data[written:]


def _end_of_lines(data: bytes) -> int:
    """Return how many bytes are complete lines."""
    end = data.rfind(b"\n") + 1
    # Bars of tqdm end without a newline for minutes.
    return len(data) if data.find(b"\r", end) >= 0 else end


def _is_reentrant(error: RuntimeError) -> bool:
    """True if a buffer of Python's has refused a thread that is inside already."""
    return str(error).startswith("reentrant call inside")


def _pieces(lines: bytes, room: int) -> Iterator[bytes]:
    """Cut between lines, so that a pipe takes each piece at once. ``room``: bytes of the first piece."""
    start = 0
    while start < len(lines):
        end = len(lines)
        if end - start > room:
            end = lines.rfind(b"\n", start, start + max(room, 0)) + 1 or lines.find(b"\n", start) + 1 or len(lines)
        yield lines[start:end]
        start, room = end, PIPE_BUF


class Text(io.TextIOWrapper):
    """A text stream on ``WholeLines``. With ``line_buffering`` it would write what is to be held back."""

    def reconfigure(self, **wanted: Any) -> None:
        """Reconfigure as ``io.TextIOWrapper`` does, but leave lines whole."""
        wanted.pop("line_buffering", None)
        super().reconfigure(**wanted)


class StampedFile(io.FileIO):
    """A standard stream of a rank. ``stamp`` notes the time of the bytes from one position to another."""

    def __init__(self, fd: int, stamp: Callable[[int, int], None]) -> None:
        super().__init__(fd, "wb", closefd=False)
        self._stamp = stamp
        self._written = 0

    def write(self, data: Any) -> int:
        # Before the write: the caller sorts what it reads by these, and may read the bytes at once.
        self._stamp(self._written, self._written + len(data))
        written = super().write(data) or 0
        self._written += written
        return written


# What user code finds in the interpreter


def install_main(function: Callable[..., Any], context: Context) -> None:
    """Make ``__main__`` of this rank look like the caller's, as far as it has come with the function and the arguments.

    So that plain pickle (torch.save, all_gather_object) finds the classes that the caller's script defined, values
    can go back to the caller by name, and multiprocessing finds the script.
    """
    arrived = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})
    # A call on ranks that stay comes here each time, mostly with nothing new.
    if _bare == [function, sys.modules.get("__main__")] and not arrived:
        return
    namespace = getattr(inspect.unwrap(function), "__globals__", {})
    from_main = namespace.get("__name__") == "__main__"
    main = types.ModuleType("__main__")
    _bare[:] = [function, main] if not from_main and not arrived else []
    for kind in list(arrived.values()):
        name = getattr(kind, "__qualname__", kind.__name__)  # a TypeVar arrives like a class, and has a plain name
        if kind.__module__ == "__main__" and "<locals>" not in name:
            # cloudpickle has made these classes outside of any module; torch.save and others look them up by name.
            _put(main, name.split("."), kind)
    if from_main:  # it knows what its names mean, of several classes that have one
        main.__dict__.update(namespace)
    if context.main_file is not None:
        main.__file__ = context.main_file
    if context.main_name is not None:  # python -m
        main.__spec__ = importlib.machinery.ModuleSpec(context.main_name, None, origin=context.main_file)
        main.__package__ = context.main_name.rpartition(".")[0]
    sys.modules["__main__"] = main


def _put(main: types.ModuleType, path: list[str], kind: object) -> None:
    """Put a class where its qualified name leads.

    A namespace takes the place of an enclosing class that has not arrived; one that has arrived holds it already.
    """
    place: Any = main
    for name in path[:-1]:
        if not hasattr(place, name):
            setattr(place, name, types.SimpleNamespace())
        place = getattr(place, name)
    if isinstance(place, types.ModuleType | types.SimpleNamespace):
        setattr(place, path[-1], kind)


class LateHook:
    """A ``sys.breakpointhook`` until a feature has one of its own. ``who`` returns "rank 1 of train()"."""

    def __init__(self, who: Callable[[], str]) -> None:
        self._who = who
        self._pid = os.getpid()

    @property
    def __call__(self) -> Callable[..., Any]:
        """The function to call: returned and not called here, as a debugger stops in the frame of its caller."""
        from mlaunch.core.load import at_breakpoint  # which most ranks do not need

        return at_breakpoint(self._who(), self._pid)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _FEATURES:
            return None
        rank = _rank_of(name)
        found: importlib.machinery.ModuleSpec | None = None if rank is None else rank.spec_of(name, path)
        return found


def let_features_stand_in() -> None:
    """Put features' modules in place of others: in later imports, and of those that were imported before the fork."""
    # First, so that a module is made here even where the one that it replaces would be found.
    sys.meta_path.insert(0, _Finder())
    for name in _FEATURES.keys() & sys.modules.keys():
        if (rank := _rank_of(name)) is not None:
            rank.change(sys.modules[name])


def _rank_of(module: str) -> Any:
    from mlaunch.core.load import at_hand  # which most ranks do not need

    return at_hand(_FEATURES[module], "rank")
