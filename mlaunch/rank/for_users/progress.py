"""``mlaunch.progress``: one bar for a loop that all ranks of a launch run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from mlaunch.protocol.board import Board

T = TypeVar("T")


class StepCount(Protocol):
    """What counts steps, while something is to happen at some of them."""

    def turn(self) -> None:
        """Takes in that a turn of a loop is over."""

    def step(self) -> None:
        """Takes in that the function says so of a step."""


@dataclass
class Slot:
    """Where this rank tells how far it is."""

    board: Board
    local_rank: int
    busy: bool = False  # a loop is being counted; one within it is not
    steps: StepCount | None = None


slot: Slot | None = None  # of this process, if it is a rank


def open_slot(board: Board, local_rank: int) -> None:
    """Notes where this process, which has become a rank, tells how far it is."""
    global slot  # noqa: PLW0603 - a fact about this process
    slot = Slot(board, local_rank)


def count_steps(count: StepCount | None) -> None:
    """Lets this count the steps of a rank from now on; None: nothing does."""
    if slot is not None:
        slot.steps = count


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


def step() -> None:
    """Says that a step of this rank is over, for ``profile=``, where no loop of ``mlaunch.progress`` counts the steps.

    Once it was called, turns of ``mlaunch.progress`` do not count. Call it equally often on all ranks that are
    profiled. In a process that is no rank of a launch, or without ``profile=``, it does nothing.
    """
    if slot is not None and slot.steps is not None:
        slot.steps.step()


def _alone(iterable: Iterable[T], desc: str, total: int | None) -> Iterable[T]:
    import torch.distributed as dist

    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress outside of a launch needs tqdm: pip install mlaunch[notebook]") from error
    grouped = dist.is_available() and dist.is_initialized()
    bar: Iterable[T] = tqdm(iterable, desc or None, total, disable=grouped and dist.get_rank() > 0)
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
            # After the item, so that a rank that hangs in its loop stands at the last step which it has finished.
            here.board.count(here.local_rank, done)
            if here.steps is not None:
                here.steps.turn()
    finally:
        here.busy = False
