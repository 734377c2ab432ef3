"""Whether a line of a program stands in an ``except`` or ``finally`` block, which runs after something else."""

from __future__ import annotations

import ast
import functools
import linecache

_HANDLES = "handling an exception"
_FINALLY = "in a finally block"


def block_of(file: str, line: str) -> str:
    """Says "handling an exception" or "in a finally block"; "" for any other line, and without the source."""
    if not line.isdigit():
        return ""
    return next((words for first, last, words in _blocks(file) if first <= int(line) <= last), "")


@functools.lru_cache(maxsize=64)
def _blocks(file: str) -> list[tuple[int, int, str]]:
    """Returns the first and last lines of such blocks, inner ones before those around them."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            parts = [(handler.body, _HANDLES) for handler in node.handlers] + [(node.finalbody, _FINALLY)]
            found += [(body[0].lineno, body[-1].end_lineno or 0, words) for body, words in parts if body]
    return found[::-1]
