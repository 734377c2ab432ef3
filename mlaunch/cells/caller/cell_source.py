"""A cell as it is sent: its text, and what it is called where it came from."""

from __future__ import annotations

import ast
import itertools
import re
import sys
import warnings
from dataclasses import dataclass
from types import FrameType
from typing import Any

from mlaunch.base.misuse import misuse
from mlaunch.caller.report import notebook
from mlaunch.protocol import sources

_MAGIC = re.compile(r"^\s*[!%?]|\?\s*$", re.MULTILINE)
_COMMAND = re.compile(r"\s*(\w+)(\s|$)")
_numbers = itertools.count(1)


@dataclass(frozen=True)
class CellSource:
    """``name`` is for messages ("cell In[7]"), ``file`` for tracebacks; ``lines_above`` are the magic's,
    or empty."""

    text: str
    name: str
    file: str
    number: int
    lines_above: int


def cell_source(text: str, *, magic: str = "") -> CellSource:
    """Makes it known to this process under a name. ``magic``: the line above the text, if there is one.

    Raises:
        SyntaxError: The text is no Python, nor what IPython makes Python of.
    """
    shell = notebook.shell()
    lines = text.splitlines(keepends=True)
    body = list(itertools.dropwhile(str.isspace, lines))  # as IPython has it, which drops these
    above, text = len(lines) - len(body) + (1 if magic else 0), "".join(body)
    whole = "\n" * above + text
    if shell is None:
        number = next(_numbers)
        found = CellSource(text, f"cell {number}", f"<cell {number}>", number, above)
        sources.take((found.file, whole))
    else:
        number = _number_of_cell(shell)
        # IPython and Jupyter name a file by a hash of raw_code, and find breakpoints by it: so it has the magic's
        # line, too.
        file = shell.compile.cache(whole, number, raw_code=f"{magic}{whole}")
        found = CellSource(text, f"cell In[{number}]", file, number, above)
    _check_syntax(found, shell)
    return found


def _number_of_cell(shell: Any) -> int:
    """Returns the number of the cell that runs; IPython's own count is ahead of it by one in some releases."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        _, name = shell.compile.format_code_name(frame.f_code.co_filename) or ("", "")
        if number := re.fullmatch(r"In\[(\d+)\]", name):
            return int(number[1])
        frame = frame.f_back
    return int(shell.execution_count)


def _check_syntax(cell: CellSource, shell: Any) -> None:
    """Raises SyntaxError before n ranks do, of which each may have run a part of the cell by then.

    What IPython knows as a command (``ls``) is left to them.
    """
    try:
        text = cell.text if shell is None else shell.input_transformer_manager.transform_cell(cell.text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a ranks' compiler, once, is enough
            whole = "\n" * cell.lines_above + text
            compile(whole, cell.file, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        if not (_MAGIC.search(cell.text) if shell is None else _is_command(cell.text, shell)):
            raise misuse(error.with_traceback(None)) from None


def _is_command(text: str, shell: Any) -> bool:
    """True if it is a line of which IPython makes a magic, as of ``ls -l``."""
    word = _COMMAND.match(text)
    one_line = len(text.strip().splitlines()) == 1
    return one_line and word is not None and shell.find_line_magic(word[1]) is not None
