"""Isolation of tests on ranks: what a test has changed is restored, or reported; its groups have names of their own."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal wraps it in enumerations, which take too long for each test
import contextlib
import functools
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlaunch.base import seeding
from mlaunch.protocol import explain, this_rank
from mlaunch.pytest.wire import Surroundings
from mlaunch.rank import device, for_users, group, in_step
from mlaunch.torch_parts import process_groups

_SEED = 0
_PAGES = os.sysconf("SC_PAGE_SIZE")
_MIB = 2**20
_MANY_PIDS = 65_536  # bytes
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


@dataclass
class Baseline:
    """The surroundings that a rank began with, including changes by fixtures on ranks."""

    variables: Mapping[bytes, bytes]
    directory: str
    path: list[str]

    @staticmethod
    def of_now() -> Baseline:
        """Return the present surroundings."""
        return Baseline(dict(os.environb), os.getcwd(), list(sys.path))


@contextlib.contextmanager
def surrounded(baseline: Baseline, changes: Surroundings) -> Iterator[None]:
    """Take environment, directory and search path from pytest's process; afterwards restore what a test has changed."""
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
    """Set a rank's surroundings for a fixture, whose changes stay for later tests until it reverts them."""
    with surrounded(baseline, changes):
        before = Baseline.of_now()
        try:
            yield
        finally:
            after, variables = Baseline.of_now(), dict(baseline.variables)
            for name, value in changed_variables(before.variables).items():
                variables.pop(name, None)
                variables.update({} if value is None else {name: value})
            baseline.variables = variables
            if after.directory != before.directory:
                baseline.directory = after.directory
            if after.path != before.path:
                baseline.path = after.path


def changed_variables(since: Mapping[bytes, bytes]) -> dict[bytes, bytes | None]:
    """Return the variables of the environment that have changed or are new since then; None: one is gone.

    Reads the dict of bytes that ``os.environ`` keeps: its methods take as long as half of the rest around a test.
    """
    now = dict(os.environ._data)  # type: ignore[attr-defined]
    found: dict[bytes, bytes | None] = dict.fromkeys(since.keys() - now.keys())
    found.update(now.items() - since.items())
    return found


def _put_back(wanted: Mapping[bytes, bytes]) -> None:
    """Write the variables that differ: to write all for each test would take as long as the rest of it."""
    for name in changed_variables(wanted):
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
    """Return the MiB of memory that this process holds."""
    fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(fd, 256).split()[1]) * _PAGES // _MIB
    finally:
        os.close(fd)


def collect() -> int:
    """Collect garbage; return the MiB that remain."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # torch keeps freed memory of a device, which other ranks may need.
        torch.cuda.empty_cache()
    return resident()


_queued: list[object] = []  # what torch will seed accelerators with once it uses them, as the last test left it


def _seed() -> None:
    """Seed all generators. On CPUs, do not queue the same seeds of accelerators again."""
    import torch

    tracker = getattr(torch.cuda, "_lazy_seed_tracker", None)
    queued = [getattr(tracker, name, None) for name in ("manual_seed_all_cb", "manual_seed_cb")]
    bound = for_users.bound
    on_cpus = (bound is None or bound.type == "cpu") and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not on_cpus or queued[0] is None or queued != _queued:
        seeding.apply(_SEED)  # torch notes the whole stack of this, in a millisecond or two
        _queued[:] = [getattr(tracker, name, None) for name in ("manual_seed_all_cb", "manual_seed_cb")]
        return
    seeding.apply_on_cpu(_SEED)


class Watch:
    """Restores, at its end, what a test has changed; notes its warnings, and threads and processes that it leaves."""

    def __init__(self, config: pytest.Config, marks: Sequence[pytest.Mark], *, keeps: bool = False) -> None:
        """``keeps``: restore nothing, for a fixture, whose changes are for its tests."""
        self._config, self._marks, self._keeps = config, marks, keeps
        self.left: tuple[str, ...] = ()
        self.warnings: tuple[tuple[str, bytes | None, str, int], ...] = ()

    def __enter__(self) -> Watch:
        if not self._keeps:
            _seed()
            self._before = [get() for get, _ in _states()]
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
        for (get, put), value in zip(_states(), self._before, strict=True):
            try:
                if get() != value:
                    put(value)
            except Exception:  # this torch refuses the value
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
    except ChildProcessError:  # there are none, as mostly; to open a file takes ten times as long
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
    """Set the filters of the configuration, the command line and the test's marks, as pytest does."""
    from _pytest.config import apply_warning_filters, parse_warning_filter

    if not sys.warnoptions:
        warnings.filterwarnings("always", category=DeprecationWarning)
        warnings.filterwarnings("always", category=PendingDeprecationWarning)
    apply_warning_filters(config.getini("filterwarnings"), config.getoption("pythonwarnings") or [])
    for mark in reversed([mark for mark in marks if mark.name == "filterwarnings"]):
        for text in mark.args:
            warnings.filterwarnings(*parse_warning_filter(text, escape=False))


# States of the process: what reads each, and what sets it


@functools.cache
def _states() -> Sequence[tuple[Callable[[], Any], Callable[[Any], object]]]:
    return (*_of_torch(), *_of_python())


def _of_python() -> Sequence[tuple[Callable[[], Any], Callable[[Any], object]]]:
    return (
        (_handlers, _put_handlers),
        (_logging, _put_logging),
        (_umask, os.umask),
        (_streams, _put_streams),
        (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
        (sys.getrecursionlimit, sys.setrecursionlimit),
    )


def _handlers() -> dict[int, Any]:
    return {number: _signal.getsignal(number) for number in _SIGNALS}


def _put_handlers(found: dict[int, Any]) -> None:
    for number, handler in found.items():
        if handler is not None:
            signal.signal(number, handler)


def _logging() -> tuple[int, list[logging.Handler], int]:
    root = logging.getLogger()
    return root.level, list(root.handlers), root.manager.disable


def _put_logging(found: tuple[int, list[logging.Handler], int]) -> None:
    root = logging.getLogger()
    root.setLevel(found[0])
    root.handlers[:] = found[1]
    logging.disable(found[2])


def _umask() -> int:
    # The kernel returns it only in exchange for another one.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _streams() -> tuple[Any, ...]:
    return sys.stdin, sys.stdout, sys.stderr, sys.excepthook


def _put_streams(found: tuple[Any, ...]) -> None:
    sys.stdin, sys.stdout, sys.stderr, sys.excepthook = found


def _of_torch() -> Sequence[tuple[Callable[[], Any], Callable[[Any], object]]]:
    import torch

    from mlaunch.comm.rank import exchange, world
    from mlaunch.torch_parts import lacking

    cudnn = torch.backends.cudnn
    return (
        (torch.get_default_dtype, torch.set_default_dtype),
        (lacking.that_was_set, torch.set_default_device),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        (_deterministic, lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.get_num_threads, torch.set_num_threads),
        (lambda: cudnn.deterministic, lambda on: setattr(cudnn, "deterministic", on)),
        (lambda: cudnn.benchmark, lambda on: setattr(cudnn, "benchmark", on)),
        (lambda: list(world._made), lambda made: world._made.__setitem__(slice(None), made)),
        (lambda: dict(exchange._gloo_twins), _put_twins),  # of the default group, for objects
    )


def _put_twins(found: dict[Any, Any]) -> None:
    from mlaunch.comm.rank import exchange

    exchange._gloo_twins.clear()
    exchange._gloo_twins.update(found)


def _deterministic() -> tuple[bool, bool]:
    import torch

    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


# Names of process groups, and of keys in the store, that are a test's own. torch names a group by a count, or by its
# ranks if only they make it, and keeps the addresses of its members under that name. A test that made a group on some
# ranks, or failed before all had made it, would leave counts that differ and addresses of nobody.

_SPACE = 1000  # groups that one test may make
_FIXTURES = 10**9  # the first number of their groups
_CLASSES = 2 * 10**9
_left_groups: set[Any] = set()  # groups that the last test has made
_kept_groups: set[Any] = set()  # groups that the tests' class has made
# Destroyed ones. Other ranks may still be in them, so their connections close with the next test.
_over_groups: list[Any] = []


@contextlib.contextmanager
def names_for_test(number: int) -> Iterator[None]:
    """Give a test its own names. Destroy the groups of the last test first; count from zero."""
    import torch.distributed as dist

    # Only now: at the test's end another rank may still be in one of its collectives, and would fail with "Connection
    # closed by peer" in place of what it has found.
    if _left_groups:
        _destroy(_left_groups)
        _left_groups.clear()
    if _over_groups and device.version() >= group.DESTRUCTIBLE:
        _over_groups.clear()
    ours, known = dist.group.WORLD, set(_groups())
    _kept_groups.intersection_update(known)
    with _own_names(f"test {number}", number * _SPACE):
        in_step.begin_call(this_rank.call)
        try:
            yield
        finally:  # not to be destroyed yet, since other ranks may still be making them
            _left_groups.update(set(_groups()) - known - _kept_groups)
            if dist.group.WORLD is not ours:
                leave_world()


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Count this rank's operations from zero."""
    in_step.begin_call(this_rank.call)
    yield


@contextlib.contextmanager
def names_for_fixture(number: int) -> Iterator[None]:
    """Give the setup of a fixture its names; the groups stay until the fixture destroys them."""
    with _own_names(f"fixture {number}", _FIXTURES + number * _SPACE):
        yield


@contextlib.contextmanager
def names_for_class(number: int) -> Iterator[None]:
    """Give the setup of a test's class its names, within the first test; the groups stay as those of fixtures do."""
    known, count = set(_groups()), process_groups.made()
    with _own_names(f"class {number}", _CLASSES + number * _SPACE):
        yield
    _kept_groups.update(set(_groups()) - known)
    process_groups.count_on_from(count)


@contextlib.contextmanager
def _own_names(prefix: str, first: int) -> Iterator[None]:
    import torch.distributed as dist

    default = dist.group.WORLD
    store = None if default is None else process_groups.store_of(default)
    if default is None or store is None:
        yield
        return
    process_groups.put_store(default, dist.PrefixStore(prefix, store))
    process_groups.count_on_from(first)
    try:
        yield
    finally:
        if dist.group.WORLD is default:
            process_groups.put_store(default, store)


def leave_world() -> None:
    """Destroy all groups of this rank. The next call makes the default group again, on all ranks."""
    import torch.distributed as dist

    if dist.is_initialized():
        _over_groups.extend(_groups())
        with contextlib.suppress(Exception):  # a rank of it may be gone
            dist.destroy_process_group()


def _groups() -> list[Any]:
    import torch.distributed as dist

    return process_groups.everyone() if dist.is_initialized() else []


def _destroy(those: Collection[Any]) -> None:
    """Destroy groups in the order in which all ranks have made them."""
    import torch.distributed as dist

    for made in _groups():
        if made in those and made is not dist.group.WORLD:
            with contextlib.suppress(Exception):
                dist.destroy_process_group(made)
