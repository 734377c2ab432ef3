"""The syntax trees of the package, which several tests look at: each file is parsed once for all of them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return what a file holds. Nobody may change it."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a file, as ``ast.walk`` gives them, which takes longer than to parse it."""
    return list(ast.walk(tree_of(path)))
