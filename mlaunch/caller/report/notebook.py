"""Code of a notebook's cells is in no file: ranks know its lines by number alone, their caller has names and text."""

from __future__ import annotations

import linecache
import os
import re
import sys

# As tracebacks write it, those of groups too, and faulthandler, which has no comma.
_FRAME = re.compile(r'(?P<margin>[ |]*)File "(?P<file>[^"]+)", line (?P<line>\d+)(?P<name>,? in .*)')


def short_name(file: str) -> str:
    """Says what to call a file in few words: "train.py"; a cell of this process's notebook "In[3]"."""
    return _cell(file) or os.path.basename(file)


def complete(traceback: str) -> str:
    """Returns the traceback with the names of cells instead of their files', and with their lines."""
    rows = traceback.splitlines()
    told: list[str] = []
    for row, following in zip(rows, [*rows, ""][1:], strict=True):
        frame = _FRAME.fullmatch(row)
        cell = _cell(frame["file"]) if frame is not None else ""
        if frame is None or not cell:
            told.append(row)
            continue
        told.append(f"{frame['margin']}Cell {cell}, line {frame['line']}{frame['name']}")
        source = linecache.getline(frame["file"], int(frame["line"])).strip()
        if source and not following.startswith(f"{frame['margin']}  "):  # a rank that inherited the lines knew them
            told.append(f"{frame['margin']}  {source}")
    return "\n".join(told)


def _cell(file: str) -> str:
    """Says "In[3]" if the file stands for a cell that this process has run, else ""."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    describe = getattr(getattr(shell, "compile", None), "format_code_name", lambda _file: None)
    _, name = describe(file) or ("", "")
    return str(name)
