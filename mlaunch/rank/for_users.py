"""The functions that user code calls in a rank: ``device``, ``progress``, ``step``, ``report``; ``RankZeroFilter``."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from mlaunch.base.fds import renewed
from mlaunch.protocol.board import REPORT_LIMIT, Board
from mlaunch.rank import launcher_variables
from mlaunch.rank.launcher_variables import RankInfo

if TYPE_CHECKING:
    import torch


Value = float | int | str | bool | None
T = TypeVar("T")

bound: torch.device | None = None  # what this process has bound, if it has become a rank


def note_device(device_of_rank: torch.device | None) -> torch.device | None:
    """Note the device that this process has bound; return the one noted before."""
    global bound
    before, bound = bound, device_of_rank
    return before


def device() -> torch.device:
    """Return this rank's device, where its model and its data belong: "cuda:1", "cpu".

    Works in ranks of mlaunch, in ranks that have joined, and in those of another launcher before they join. In any
    other process it is the CPU.

    Example:
        >>> @launcher(n_gpus=4)
        ... def train():
        ...     model = Model().to(mlaunch.device())
    """
    import torch

    if bound is not None:
        return bound
    place = launcher_variables.recognise(os.environ)
    if place is None or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    return device_at(place, None if accelerator is None else accelerator.type)


def device_at(info: RankInfo, accelerator: str | None) -> torch.device:
    """Return the device that a rank at this place takes, of those that it sees. ``accelerator``: None for the CPU."""
    import torch

    if accelerator is None:
        return torch.device("cpu")
    # Where the launcher sets no local rank, all machines are taken to have equally many devices.
    local_rank = info.rank if info.local_rank is None else info.local_rank
    return torch.device(accelerator, local_rank % torch.accelerator.device_count())


class StepCount(Protocol):
    """A counter of steps, for a feature that acts at some of them."""

    def turn(self) -> None:
        """Count a turn of a loop of ``mlaunch.progress``."""

    def step(self) -> None:
        """Count a step for which the function has called ``mlaunch.step``."""


@dataclass
class Slot:
    """Where this rank notes how far it is."""

    board: Board
    local_rank: int
    busy: bool = False  # a loop is being counted; one within it is not
    steps: StepCount | None = None


slot: Slot | None = None  # of this process, if it is a rank
_report_lock = renewed(threading.Lock())  # a ring has one writer, a rank may have many threads


def open_slot(board: Board, local_rank: int) -> None:
    """Note where this process, which has become a rank, notes how far it is."""
    global slot  # noqa: PLW0603 - a fact about this process
    slot = Slot(board, local_rank)


def count_steps(count: StepCount | None) -> None:
    """Count the steps of this rank with ``count`` from now on; None: no longer."""
    if slot is not None:
        slot.steps = count


def progress(iterable: Iterable[T], desc: str = "", total: int | None = None) -> Iterable[T]:
    """Iterate, and show how far the ranks are: in the launch's terminal or notebook, one bar for all of them.

    The bar shows where the slowest rank of this machine is, and how far that one is behind the first. All ranks should
    run the loop. Of nested loops the outermost is shown. Outside of a rank of mlaunch it is tqdm's bar, on rank 0 only.

    Args:
        iterable: What to iterate over.
        desc: The text in front of the bar.
        total: The number of items, if ``len(iterable)`` does not tell.

    Raises:
        ImportError: Outside of a rank of mlaunch, without tqdm (extra: notebook).
    """
    if slot is None:
        return _alone(iterable, desc, total)
    return iterable if slot.busy else _counted(iterable, desc, _total(iterable, total), slot)


def step() -> None:
    """Mark the end of a step of this rank for ``profile=``, where no loop of ``mlaunch.progress`` counts the steps.

    After the first call, turns of ``mlaunch.progress`` no longer count. Call it equally often on all ranks that are
    profiled. Without ``profile=``, or in a process that is no rank of a launch, it does nothing.
    """
    if slot is not None and slot.steps is not None:
        slot.steps.step()


def report(step: int, **values: Value) -> None:
    """Report values of this launch to the process that has submitted it: ``mlaunch.report(step, loss=loss.item())``.

    They are in ``Run.reports`` there, by rank, and are passed to the callback of ``Run.on_report``. This never waits:
    the latest 256 of each rank are kept until they are read. In a process that is no rank of a launch it does nothing.

    Args:
        step: A number of your choice.
        **values: Numbers, short strings, None. Of one-element tensors and numpy's numbers their ``item()``.

    Raises:
        TypeError: A value of another type.
        ValueError: The values take more than about 400 characters.
    """
    # JSON: a reader must not unpickle what a rank has sent.
    data = json.dumps([_plain("step", step), {name: _plain(name, value) for name, value in values.items()}]).encode()
    if len(data) > REPORT_LIMIT:
        raise ValueError(
            f"report() of {len(data)} bytes; allowed: {REPORT_LIMIT}, for a few numbers. Return larger values"
        )
    if slot is not None:
        with _report_lock:
            slot.board.ring(slot.local_rank).add(data)


def _plain(name: str, value: object) -> Value:
    item = getattr(value, "item", None)
    plain = item() if callable(item) else value
    if plain is None or isinstance(plain, bool | int | float | str):
        return plain
    raise TypeError(f"report({name}={type(value).__name__}): allowed: a number, a short string, or None")


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
            # After the item, so that a rank that hangs in its loop shows the last step that it has finished.
            here.board.count(here.local_rank, done)
            if here.steps is not None:
                here.steps.turn()
    finally:
        here.busy = False


class RankZeroFilter(logging.Filter):
    """A filter that passes rank 0's records, and of the other ranks only serious ones.

    Args:
        level: From this level on, records of all ranks pass.
        per_machine: Records of the first rank of each machine pass as rank 0's do.

    Example:
        >>> import logging
        >>> handler = logging.StreamHandler()
        >>> handler.addFilter(RankZeroFilter())
    """

    def __init__(self, level: int = logging.ERROR, *, per_machine: bool = False) -> None:
        super().__init__()
        self._level = level
        self._variable = "LOCAL_RANK" if per_machine else "RANK"

    def filter(self, record: logging.LogRecord) -> bool:
        # At each record, not once: the handler may be made before this process is a rank.
        return record.levelno >= self._level or os.environ.get(self._variable, "0") == "0"
