"""Runs a notebook's cell in this rank, in a ``__main__`` that stays from cell to cell."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Protocol

from mlaunch.base.frames import is_library
from mlaunch.cells.rank.plain_shell import PlainShell
from mlaunch.cells.wire import CellAnswer
from mlaunch.protocol import this_rank
from mlaunch.rank.whole import whole

main = types.ModuleType("__main__")  # the cells'


class CellRunner(Protocol):
    """What runs cells."""

    def run(self, source: str, file: str, number: int, lines_above: int, /, *, collects: bool = False) -> CellAnswer:
        """Runs one; raises what the cell raises. ``collects``: what it displays goes back with the answer."""


def run_cell(
    source: str, file: str, place: tuple[int, int], targets: Sequence[int] | None, rich: bool
) -> CellAnswer | None:
    """Runs a cell; on the ranks that are no targets, nothing.

    Args:
        source: Its text.
        file: What stands for it in tracebacks.
        place: The cell's number, and how many lines of it are above the text.
        targets: The ranks on which the cell runs. None: all.
        rich: All targets answer with all forms of what they show, not only the first of them.
    """
    here = rank()
    first = 0 if targets is None else min(targets)
    if targets is not None and here not in targets:
        return None
    with main_of_cells():
        try:
            # Rank 0 has a pipe to a notebook, which shows at once what it displays; not in order with what others do.
            answer = shell().run(source, file, *place, collects=rich or here == first != 0)
        except SystemExit as leaving:
            # A SystemExit would end this rank, and with it all that the cells have made.
            said = "" if leaving.code is None else repr(leaving.code)
            raised = RuntimeError(f"the cell called sys.exit({said}); ranks end with %ranks --close")
            raise raised.with_traceback(_of_user(leaving.__traceback__)) from None
    # Each rank has made all forms, which may take a collective; one rank's are enough to be seen.
    return answer if rich or here == first else _in_short(answer)


def _of_user(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Cuts off the frames of what ends a program, such as IPython's ``exit``."""
    last, following = None, trace
    while following is not None:
        last = last if is_library(following.tb_frame.f_code.co_filename) else following
        following = following.tb_next
    if last is not None:
        last.tb_next = None
    return trace


def rank() -> int:
    """Returns the number of this rank; 0 in a process that is none."""
    return 0 if this_rank.this_rank is None else this_rank.this_rank.rank


@functools.cache
@whole
def shell() -> CellRunner:
    """Returns what runs cells here: IPython, where it is installed."""
    try:
        from mlaunch.cells.rank.shell import open_shell
    except ModuleNotFoundError as error:
        # A package that IPython lacks is another matter than IPython that is not there: it should be told.
        if (error.name or "").partition(".")[0] not in {"IPython", "traitlets"}:
            raise
        return PlainShell(main)
    return open_shell(main)


@contextlib.contextmanager
def main_of_cells() -> Iterator[types.ModuleType]:
    """Makes the cells' namespace ``__main__``.

    Not for longer: values that go back are pickled without it, by value, since the notebook has none of its classes.
    """
    before = sys.modules.get("__main__")
    sys.modules["__main__"] = main
    try:
        yield main
    finally:
        if before is not None:
            sys.modules["__main__"] = before


def _in_short(answer: CellAnswer) -> CellAnswer:
    return CellAnswer(answer.last and answer.last.plain(), (), answer.without_ipython)
