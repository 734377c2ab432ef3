"""``mlaunch.progress``: one bar for a loop that all ranks of a launch run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from mlaunch.protocol.board import Board

T = TypeVar("T")


@dataclass
class Slot:
    """Where this rank tells how far it is."""

    board: Board
    local_rank: int
    busy: bool = False  # a loop is being counted; one within it is not


slot: Slot | None = None  # set by the worker


def progress(iterable: Iterable[T], desc: str = "", total: int | None = None) -> Iterable[T]:
    """Iterates, and shows how far the ranks are: in the launch's terminal or notebook, one bar for all of them.

    The bar stands where the slowest rank of this machine is, and says how far that one is behind the first. All ranks
    should run the loop. Of loops within loops the outermost is shown. Elsewhere than in a rank of mlaunch it is tqdm's
    bar, on rank 0 alone.

    Args:
        iterable: What to iterate over.
        desc: Stands in front of the bar.
        total: The number of items, if ``len(iterable)`` does not tell.

    Raises:
        ImportError: Outside of a rank of mlaunch, without tqdm (extra: notebook).
    """
    if slot is None:
        return _alone(iterable, desc, total)
    return iterable if slot.busy else _counted(iterable, desc, _total(iterable, total), slot)


def _alone(iterable: Iterable[T], desc: str, total: int | None) -> Iterable[T]:
    from mlaunch.collectives import world

    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress outside of a launch needs tqdm: pip install mlaunch[notebook]") from error
    bar: Iterable[T] = tqdm(iterable, desc or None, total, disable=world.get_rank() > 0)
    return bar


def _total(iterable: Iterable[object], total: int | None) -> int:
    if total is not None:
        return total
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:
        return -1


def _counted(iterable: Iterable[T], desc: str, total: int, here: Slot) -> Iterator[T]:
    here.busy = True
    here.board.begin_loop(here.local_rank, total, desc)
    try:
        for done, item in enumerate(iterable, 1):
            yield item
            here.board.count(here.local_rank, done)
    finally:
        here.busy = False
