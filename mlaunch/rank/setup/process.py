"""A forked process is made like that of a new interpreter, and ends like one."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal wraps in enumerations, which take 50 times as long
import atexit
import contextlib
import ctypes
import functools
import gc
import io
import logging
import multiprocessing.process
import multiprocessing.util
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from mlaunch.base.fds import in_forks
from mlaunch.rank.whole_lines import Text, WholeLines

_TEMPORARY = ("TMPDIR", "TEMP", "TMP")  # where tempfile looks
_libc = ctypes.CDLL(None)
_INHERITED_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


def _plain(fd: int) -> io.FileIO:
    return io.FileIO(fd, "wb", closefd=False)


def reset_process(
    *, of_a_function: bool = True, open_stream: Callable[[int], io.FileIO] = _plain, own_handlers_alone: bool = False
) -> None:
    """Give a forked process the signals, streams, exit handlers and collector of a new interpreter.

    A command keeps the exit handlers of the modules that were imported for it, and chooses its streams.
    ``own_handlers_alone``: of logging's handlers, close only those made from now on at the end. Those of a fork server
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
        inherited = list(logging._handlerList) if own_handlers_alone else []  # type: ignore[attr-defined]
        atexit.register(_shut_down_logging, inherited)
        if getattr(sys.stdin, "name", None) == os.devnull:  # of the process that we were forked from
            sys.stdin.close()
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - it lives as long as the process
        sys.stdout, sys.stderr = _by_lines(open_stream(1)), _by_lines(open_stream(2))
    gc.enable()  # the fork server has disabled it for its imports


def _shut_down_logging(inherited: list[object]) -> None:
    known = {id(reference) for reference in inherited}
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
    zone, places = os.environ.get("TZ"), [os.environ.get(name) for name in _TEMPORARY]
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:  # each change is a call of putenv
            os.environ[name] = value
    if zone != wanted.get("TZ"):
        time.tzset()
    if "tempfile" in sys.modules and places != [wanted.get(name) for name in _TEMPORARY]:
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
