"""Names and lines of a notebook's cells, whose code is in no file: ranks only know its line numbers."""

from __future__ import annotations

import linecache
import os
import re
import sys
from typing import Any

# A line of a traceback, also of an exception group's, or of faulthandler, which writes no comma.
_FRAME = re.compile(r'(?P<margin>[ |]*)File "(?P<file>[^"]+)", line (?P<line>\d+)(?P<name>(?:,? in .*)?)')

_CELL_FILE = re.compile(r"[^\s(\"]*ipykernel_[^\s(\"]*\.py")


def short_name(file: str) -> str:
    """Return a file's short name: "train.py", or "In[3]" for a cell of this process's notebook."""
    return _cell(file) or os.path.basename(file)


def source() -> str:
    """Return the source of a call, for people: "In[3] of tour.ipynb", "train.py", "python -m pkg.train", "a prompt"."""
    running = shell()
    if running is not None:
        variables = getattr(running, "user_ns", {})
        file = os.environ.get("JPY_SESSION_NAME") or variables.get("__vsc_ipynb_file__") or "IPython"
        return f"In[{getattr(running, 'execution_count', '')}] of {os.path.basename(str(file))}"
    main = sys.modules.get("__main__")
    module, file = getattr(getattr(main, "__spec__", None), "name", None), getattr(main, "__file__", None)
    if module is not None or file is not None:
        return f"python -m {module.removesuffix('.__main__')}" if module else os.path.basename(str(file))
    return "python -c" if sys.argv[:1] == ["-c"] else "a prompt"


def complete(traceback: str) -> str:
    """Return the traceback with cells' names in place of their files', and with their lines."""
    rows = traceback.splitlines()
    completed: list[str] = []
    for row, following in zip(rows, [*rows, ""][1:], strict=True):
        frame = _FRAME.fullmatch(row)
        cell = _cell(frame["file"]) if frame is not None else ""
        if frame is None or not cell:
            completed.append(row)
            continue
        completed.append(f"{frame['margin']}Cell {cell}, line {frame['line']}{frame['name']}")
        source = linecache.getline(frame["file"], int(frame["line"])).strip()
        if source and not following.startswith(
            f"{frame['margin']}  "
        ):  # a rank that inherited the lines has written them
            completed.append(f"{frame['margin']}  {source}")
    return "\n".join(completed)


def short_names(text: str) -> str:
    """Return a debugger's text with cells' names in place of their files'."""
    return _CELL_FILE.sub(lambda found: _cell(found[0]) or found[0], text) if shell() is not None else text


def short_place(place: str) -> str:
    """Return "train.py:12 in train", given the same with a whole path; for a cell, "In[3]:12 in train"."""
    file, colon, rest = place.rpartition(":")
    return f"{short_name(file)}{colon}{rest}"


def _cell(file: str) -> str:
    """Return "In[3]" if the file is a cell that this process has run; else ""."""
    running = shell()
    describe = getattr(getattr(running, "compile", None), "format_code_name", lambda _file: None)
    _, name = describe(file) or ("", "")
    return str(name)


def shell() -> Any:
    """Return IPython's shell, if this process has one."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if find is None else find()


def is_here() -> bool:
    """True if this process is the kernel of a notebook."""
    return getattr(shell(), "kernel", None) is not None
