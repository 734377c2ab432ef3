"""Runs cells where IPython is not installed: Python alone, without magics."""

from __future__ import annotations

import ast
import asyncio
import inspect
import types
from typing import Any

from mlaunch.cells.wire import Bundle, CellAnswer
from mlaunch.protocol import sources

_RICH = {"_repr_html_": "text/html", "_repr_svg_": "image/svg+xml", "_repr_markdown_": "text/markdown"}


class PlainShell:
    """Compiles cells and executes them in a module."""

    def __init__(self, module: types.ModuleType) -> None:
        self._names = vars(module)

    def run(self, source: str, file: str, _number: int, lines_above: int, /, *, collects: bool = False) -> CellAnswer:  # noqa: ARG002
        """Runs a cell; raises what the cell raises."""
        source = "\n" * lines_above + source
        # Before it is compiled: a traceback of a syntax error shows the line, too.
        sources.take((file, source))
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
