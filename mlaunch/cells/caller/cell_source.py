"""A cell as it is sent: its text, and its names for messages and tracebacks."""

from __future__ import annotations

import ast
import itertools
import re
import sys
import warnings
from dataclasses import dataclass
from types import FrameType
from typing import Any

from mlaunch.base.exceptions import misuse
from mlaunch.caller.report import notebook
from mlaunch.protocol import by_value

_MAGIC = re.compile(r"^\s*[!%?]|\?\s*$", re.MULTILINE)
_COMMAND = re.compile(r"\s*(\w+)(\s|$)")
_numbers = itertools.count(1)


@dataclass(frozen=True)
class CellSource:
    """A cell. ``name``: for messages ("cell In[7]"); ``file``: for tracebacks; ``lines_above``: magic, empty ones."""

    text: str
    name: str
    file: str
    number: int
    lines_above: int


def cell_source(text: str, *, magic: str = "") -> CellSource:
    """Register a cell with this process, for tracebacks. ``magic``: the line above the text, if there is one.

    Raises:
        SyntaxError: The text is not Python, nor what IPython turns into Python.
    """
    shell = notebook.shell()
    lines = text.splitlines(keepends=True)
    body = list(itertools.dropwhile(str.isspace, lines))  # IPython drops these lines, too
    above, text = len(lines) - len(body) + (1 if magic else 0), "".join(body)
    whole = "\n" * above + text
    if shell is None:
        number = next(_numbers)
        found = CellSource(text, f"cell {number}", f"<cell {number}>", number, above)
        by_value.take_source((found.file, whole))
    else:
        number = _number_of_cell(shell)
        # IPython and Jupyter name a file, and find breakpoints, by a hash of raw_code: it includes the magic's line.
        file = shell.compile.cache(whole, number, raw_code=f"{magic}{whole}")
        found = CellSource(text, f"cell In[{number}]", file, number, above)
    _check_syntax(found, shell)
    return found


def _number_of_cell(shell: Any) -> int:
    """Return the number of the cell that runs; IPython's own count is ahead by one in some releases."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        _, name = shell.compile.format_code_name(frame.f_code.co_filename) or ("", "")
        if number := re.fullmatch(r"In\[(\d+)\]", name):
            return int(number[1])
        frame = frame.f_back
    return int(shell.execution_count)


def _check_syntax(cell: CellSource, shell: Any) -> None:
    """Raise SyntaxError here, before ranks have run a part of the cell.

    What IPython knows as a command (``ls``) is left to the ranks.
    """
    try:
        text = cell.text if shell is None else shell.input_transformer_manager.transform_cell(cell.text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks' compiler warns, too
            whole = "\n" * cell.lines_above + text
            compile(whole, cell.file, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        if not (_MAGIC.search(cell.text) if shell is None else _is_command(cell.text, shell)):
            raise misuse(error.with_traceback(None)) from None


def _is_command(text: str, shell: Any) -> bool:
    """True if the text is one line that IPython runs as a magic, such as ``ls -l``."""
    word = _COMMAND.match(text)
    one_line = len(text.strip().splitlines()) == 1
    return one_line and word is not None and shell.find_line_magic(word[1]) is not None
