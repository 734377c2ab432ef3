"""Names of process groups and of keys in the store that are a test's own.

torch names a group by a count, or by its ranks if only they make it, and keeps the addresses of its members under that
name. A test that made a group on some ranks, or failed before all had made it, would leave counts that differ and
addresses of nobody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from mlaunch.protocol import this_rank
from mlaunch.rank import in_step
from mlaunch.rank.setup import device, group
from mlaunch.torch_parts import process_groups

_SPACE = 1000  # groups that one test may make
_FIXTURES = 10**9  # the first number of their groups
_CLASSES = 2 * 10**9
_left: set[Any] = set()  # groups that the last test has made
_kept: set[Any] = set()  # groups that the tests' class has made
_over: list[
    Any
] = []  # destroyed groups; other ranks may still be in them, so their connections close with the next test


def for_test(number: int) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a test has its own names. Destroy the groups of the last test; count from zero."""
    return _apart(f"test {number}", number * _SPACE)


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Count this rank's operations from zero."""
    in_step.begin_call(this_rank.call)
    yield


@contextlib.contextmanager
def for_fixture(number: int) -> Iterator[None]:
    """Give the setup of a fixture its names; the groups stay until the fixture destroys them."""
    with _own_names(f"fixture {number}", _FIXTURES + number * _SPACE):
        yield


@contextlib.contextmanager
def for_class(number: int) -> Iterator[None]:
    """Give the setup of a test's class its names, within the first test; the groups stay as those of fixtures do."""
    known, count = set(_groups()), process_groups.made()
    with _own_names(f"class {number}", _CLASSES + number * _SPACE):
        yield
    _kept.update(set(_groups()) - known)
    process_groups.count_on_from(count)


@contextlib.contextmanager
def _apart(prefix: str, first: int) -> Iterator[None]:
    import torch.distributed as dist

    # Only now: at the test's end another rank may still be in one of its collectives, and would fail with "Connection
    # closed by peer" in place of what it has found.
    if _left:
        _destroy(_left)
        _left.clear()
    if _over and device.version() >= group.DESTRUCTIBLE:
        _over.clear()
    ours, known = dist.group.WORLD, set(_groups())
    _kept.intersection_update(known)
    with _own_names(prefix, first):
        in_step.begin_call(this_rank.call)
        try:
            yield
        finally:  # not to be destroyed yet, since other ranks may still be making them
            _left.update(set(_groups()) - known - _kept)
            if dist.group.WORLD is not ours:
                leave_world()


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
        _over.extend(_groups())
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
