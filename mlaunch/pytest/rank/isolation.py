"""What a test can leave on a rank is put back, or told. Everything here runs in the ranks."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlaunch.base import seeding
from mlaunch.protocol import explain
from mlaunch.pytest.rank import process_states
from mlaunch.pytest.wire.rank_tests import Surroundings
from mlaunch.rank.for_users import current_device

_SEED = 0
_PAGES = os.sysconf("SC_PAGE_SIZE")
_MIB = 2**20
_MANY_PIDS = 65_536  # bytes


@dataclass
class Baseline:
    """The surroundings that a rank has begun with, and what fixtures on ranks have changed in them."""

    variables: Mapping[bytes, bytes]
    directory: str
    path: list[str]

    @staticmethod
    def of_now() -> Baseline:
        """Returns the present ones."""
        return Baseline(dict(os.environb), os.getcwd(), list(sys.path))


@contextlib.contextmanager
def surrounded(baseline: Baseline, changes: Surroundings) -> Iterator[None]:
    """Takes over environment, directory and search path of pytest's process; afterwards none of the test's are left."""
    for name, value in changes.variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _go_to(changes.directory or baseline.directory)
    sys.path[:] = baseline.path if changes.path is None else changes.path
    try:
        yield
    finally:
        _put_back(baseline.variables)
        _go_to(baseline.directory)
        sys.path[:] = baseline.path


@contextlib.contextmanager
def kept(baseline: Baseline, changes: Surroundings) -> Iterator[None]:
    """Do the same for a fixture: what it changes stays for the tests after it, until it changes it back."""
    with surrounded(baseline, changes):
        before = Baseline.of_now()
        try:
            yield
        finally:
            after, variables = Baseline.of_now(), dict(baseline.variables)
            for name, value in process_states.changed_variables(before.variables).items():
                variables.pop(name, None)
                variables.update({} if value is None else {name: value})
            baseline.variables = variables
            if after.directory != before.directory:
                baseline.directory = after.directory
            if after.path != before.path:
                baseline.path = after.path


def _put_back(wanted: Mapping[bytes, bytes]) -> None:
    """Writes the variables that differ: all of them for each test would take as long as the rest of it."""
    for name in process_states.changed_variables(wanted):
        if name in wanted:
            os.environb[name] = wanted[name]
        else:
            del os.environb[name]


def _go_to(directory: str) -> None:
    try:
        if os.getcwd() == directory:
            return
    except FileNotFoundError:  # the test has removed it
        pass
    with contextlib.suppress(OSError):
        os.chdir(directory)


def resident() -> int:
    """Returns the MiB of memory that this process holds."""
    fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(fd, 256).split()[1]) * _PAGES // _MIB
    finally:
        os.close(fd)


def collect() -> int:
    """Lets go of what nobody uses; returns the MiB that remain."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # torch keeps freed memory of a device for itself, where the next test's ranks would miss it.
        torch.cuda.empty_cache()
    return resident()


_queued: list[object] = []  # what torch is to seed accelerators with once it uses them, as the last test left it


def _seed() -> None:
    """Seeds all generators alike. On CPUs torch need not be told again what it is to seed accelerators with."""
    import torch

    tracker = getattr(torch.cuda, "_lazy_seed_tracker", None)
    queued = [getattr(tracker, name, None) for name in ("manual_seed_all_cb", "manual_seed_cb")]
    bound = current_device.bound
    on_cpus = (bound is None or bound.type == "cpu") and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not on_cpus or queued[0] is None or queued != _queued:
        seeding.apply(_SEED)  # of which torch notes the whole stack, in a millisecond or two
        _queued[:] = [getattr(tracker, name, None) for name in ("manual_seed_all_cb", "manual_seed_cb")]
        return
    seeding.apply_on_cpu(_SEED)


class Watch:
    """Puts back what a test has changed, from its end to where it began; notes its warnings and what it leaves."""

    def __init__(self, config: pytest.Config, marks: Sequence[pytest.Mark], *, keeps: bool = False) -> None:
        """``keeps``: it is a fixture, which is to change what its tests find."""
        self._config, self._marks, self._keeps = config, marks, keeps
        self.left: tuple[str, ...] = ()
        self.warnings: tuple[tuple[str, bytes | None, str, int], ...] = ()

    def __enter__(self) -> Watch:
        if not self._keeps:
            _seed()
            self._before = [get() for get, _ in process_states.all_of()]
            self._threads = set(threading.enumerate())
            self._children = _children()
        self._recorder = warnings.catch_warnings(record=True)
        log = self._recorder.__enter__()
        self._log = [] if log is None else log
        _set_filters(self._config, self._marks)
        return self

    def __exit__(self, *_: object) -> None:
        self._recorder.__exit__(None, None, None)
        self.warnings = tuple(dict.fromkeys(map(_plain, self._log)))
        if self._keeps:
            return
        for (get, put), value in zip(process_states.all_of(), self._before, strict=True):
            try:
                if get() != value:
                    put(value)
            except Exception:  # what this torch does not take back
                continue
        self.left = (*self._left_threads(), *self._left_children())

    def _left_threads(self) -> list[str]:
        new = [thread for thread in threading.enumerate() if thread not in self._threads]
        return [f"thread {thread.name!r}" for thread in new if thread.is_alive() and not _is_torchs(thread)]

    def _left_children(self) -> list[str]:
        multiprocessing.active_children()  # reaps those that have ended
        return [f"process {pid}" for pid in sorted(_children() - self._children) if not _is_zombie(pid)]


def _is_torchs(thread: threading.Thread) -> bool:
    return thread.name.startswith(("pytorch", "torch", "mlaunch"))


def _children() -> set[int]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # reaps none
    except ChildProcessError:  # there are none; mostly, and to open a file takes ten times as long
        return set()
    with contextlib.suppress(OSError):  # a kernel without it
        fd = os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return set(map(int, os.read(fd, _MANY_PIDS).split()))
        finally:
            os.close(fd)
    return set()


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    return True


def _plain(found: warnings.WarningMessage) -> tuple[str, bytes | None, str, int]:
    message = found.message
    pickled = explain.pickle_exception(message) if isinstance(message, Warning) else None
    return str(message), pickled, found.filename, found.lineno


def _set_filters(config: pytest.Config, marks: Sequence[pytest.Mark]) -> None:
    """Sets the filters of the configuration, the command line and the test's marks, as pytest does."""
    from _pytest.config import apply_warning_filters, parse_warning_filter

    if not sys.warnoptions:
        warnings.filterwarnings("always", category=DeprecationWarning)
        warnings.filterwarnings("always", category=PendingDeprecationWarning)
    apply_warning_filters(config.getini("filterwarnings"), config.getoption("pythonwarnings") or [])
    for mark in reversed([mark for mark in marks if mark.name == "filterwarnings"]):
        for text in mark.args:
            warnings.filterwarnings(*parse_warning_filter(text, escape=False))
