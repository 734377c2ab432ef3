"""Run a notebook's cell in this rank, in a ``__main__`` that stays from cell to cell."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mlaunch.base.frames import is_library
from mlaunch.cells.wire import Bundle, CellAnswer
from mlaunch.protocol import by_value, this_rank
from mlaunch.ranks.rank.kept import uninterrupted

if TYPE_CHECKING:
    from mlaunch.cells.rank.shell import CellShell

main = types.ModuleType("__main__")  # the cells'
_RICH = {"_repr_html_": "text/html", "_repr_svg_": "image/svg+xml", "_repr_markdown_": "text/markdown"}


def run_cell(
    source: str, file: str, place: tuple[int, int], targets: Sequence[int] | None, rich: bool
) -> CellAnswer | None:
    """Run a cell here; return None on ranks that are not its targets.

    Args:
        source: Its text.
        file: Its name in tracebacks.
        place: The cell's number, and how many lines of it are above the text.
        targets: The ranks on which the cell runs. None: all.
        rich: All targets answer with all forms of what they show, not only the first target.
    """
    here = rank()
    first = 0 if targets is None else min(targets)
    if targets is not None and here not in targets:
        return None
    with main_of_cells():
        try:
            # Rank 0 has a pipe to the notebook, which shows at once what it displays.
            answer = shell().run(source, file, *place, collects=rich or here == first != 0)
        except SystemExit as leaving:
            # It would end this rank, and with it all that the cells have made.
            said = "" if leaving.code is None else repr(leaving.code)
            raised = RuntimeError(f"the cell called sys.exit({said}); ranks end with %ranks --close")
            raise raised.with_traceback(_of_user(leaving.__traceback__)) from None
    # Each rank has made all forms, since that may take a collective; those of one rank are enough to show.
    return answer if rich or here == first else _in_short(answer)


def _of_user(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without the library's frames at its end, such as those of IPython's ``exit``."""
    last, following = None, trace
    while following is not None:
        last = last if is_library(following.tb_frame.f_code.co_filename) else following
        following = following.tb_next
    if last is not None:
        last.tb_next = None
    return trace


def rank() -> int:
    """Return this rank's number; 0 in a process that is not a rank."""
    return 0 if this_rank.this_rank is None else this_rank.this_rank.rank


@functools.cache
@uninterrupted
def shell() -> PlainShell | CellShell:
    """Return the shell that runs cells here: IPython's, if it is installed."""
    try:
        from mlaunch.cells.rank.shell import open_shell
    except ModuleNotFoundError as error:
        # IPython is there, but lacks a package: an error to show.
        if (error.name or "").partition(".")[0] not in {"IPython", "traitlets"}:
            raise
        return PlainShell(main)
    return open_shell(main)


@contextlib.contextmanager
def main_of_cells() -> Iterator[types.ModuleType]:
    """Make the cells' namespace ``__main__`` meanwhile.

    Values are sent back without it, so that they are pickled by value: the notebook has none of its classes.
    """
    before = sys.modules.get("__main__")
    sys.modules["__main__"] = main
    try:
        yield main
    finally:
        if before is not None:
            sys.modules["__main__"] = before


def open_shell_early() -> None:
    """Open the shell, before the first cell."""
    with main_of_cells():
        shell()


def _in_short(answer: CellAnswer) -> CellAnswer:
    return CellAnswer(answer.last and answer.last.plain(), (), answer.without_ipython)


class PlainShell:
    """Runs cells where IPython is not installed: Python alone, without magics."""

    def __init__(self, module: types.ModuleType) -> None:
        self._names = vars(module)

    def run(self, source: str, file: str, _number: int, lines_above: int, /, *, collects: bool = False) -> CellAnswer:  # noqa: ARG002
        """Run a cell; raise what the cell raises."""
        source = "\n" * lines_above + source
        # Before it is compiled, so that a syntax error shows the line.
        by_value.take_source((file, source))
        flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        body = compile(source, file, "exec", flags, dont_inherit=True).body
        # As in a notebook: the value of a last expression is shown, unless a semicolon follows it.
        last = body.pop() if body and isinstance(body[-1], ast.Expr) and not source.rstrip().endswith(";") else None
        self._evaluate(ast.Module(body, []), file, "exec")
        value = self._evaluate(ast.Expression(last.value), file, "eval") if isinstance(last, ast.Expr) else None
        if value is not None:
            self._names["_"] = value
        return CellAnswer(None if value is None else _bundle(value), (), without_ipython=True)

    def _evaluate(self, tree: ast.Module | ast.Expression, file: str, mode: str) -> Any:
        code = compile(tree, file, mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        found = eval(code, self._names)
        return asyncio.run(found) if code.co_flags & inspect.CO_COROUTINE else found


def _bundle(value: object) -> Bundle:
    data = {"text/plain": repr(value)}
    for name, mime in _RICH.items():
        make = None if isinstance(value, type) else getattr(value, name, None)
        if callable(make) and (found := make()) is not None:
            data[mime] = found
    return Bundle(data, {}, {})
