"""A user's own code in what mlaunch says, most of all in a notebook.

Names and lines of cells, whose code is in no file: ranks only know its line numbers. Errors and warnings as from the
line of the call; in IPython and Jupyter, without our frames.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import re
import sys
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from mlaunch.base.exceptions import LaunchError, hides_our_frames
from mlaunch.base.frames import is_ours

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


# Errors and warnings as from the line of the call

E = TypeVar("E", bound=BaseException)
R = TypeVar("R")
P = ParamSpec("P")

_HOOK = "_render_traceback_"  # IPython calls this method of an exception: the only way to hide its last frame
_CONTEXTLIB = contextlib.__file__
_FUTURES = f"{os.sep}concurrent{os.sep}futures{os.sep}"
_READ_ON = "The report of what every rank was doing is above, at LaunchError."


def without_ours(error: E) -> E:
    """Return the error, to be raised as if from the line of the call: without its frames so far, or ours later."""
    return hide_ours(error.with_traceback(None))


def raises_from_caller(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function's errors that its caller has caused, and interrupts, come from the line of the call."""

    @functools.wraps(function)
    def door(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if not hides_our_frames(error):
                raise
            raise without_ours(error) from error.__cause__

    return door


def hide_ours(error: E) -> E:
    """Make IPython, if it runs here, show the error without our frames; return the error."""
    if shell() is not None and not hasattr(error, _HOOK):
        BaseException.__setattr__(error, _HOOK, _Rendering())
    return error


class _Rendering:
    """A function that returns the lines that IPython shows. It does not hold the error, which would be a cycle."""

    def __call__(self) -> list[str]:
        error: Any = sys.last_value  # IPython has set it to the error that it shows
        table = shell().InteractiveTB
        trace = _of_the_user(error.__traceback__)
        lines = list(table.structured_traceback(type(error), error, trace, tb_offset=0))
        is_shown = any(LaunchError.__name__ in line for line in lines)  # not if the user wants a single line
        return [*lines, _READ_ON] if isinstance(error.__cause__, LaunchError) and is_shown else lines

    def __reduce__(self) -> tuple[Any, ...]:
        return _Rendering, ()


def _of_the_user(trace: TracebackType | None) -> TracebackType | None:
    """Return the frames from the first that is not IPython's to the last that is not ours; all if none are left."""
    frames = []
    while (step := trace) is not None:
        frames.append(step)
        trace = step.tb_next
    shown = list(frames)
    while shown and _is_ipython(shown[0]):
        del shown[0]
    while shown and _is_plumbing(shown[-1]):
        del shown[-1]
    linked: TracebackType | None = None
    for step in reversed(shown or frames):
        linked = TracebackType(linked, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return linked


def _is_ipython(step: TracebackType) -> bool:
    return str(step.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in {"IPython", "ipykernel"}


def _is_plumbing(step: TracebackType) -> bool:
    file = step.tb_frame.f_code.co_filename
    return is_ours(file) or _FUTURES in file


def warn_caller(message: str) -> None:
    """Issue a RuntimeWarning that points at the line that called into this package."""
    frame, level = sys._getframe(1), 2  # level 1 is this function
    while frame.f_back is not None and _is_between(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def _is_between(file: str) -> bool:
    return is_ours(file) or file == _CONTEXTLIB
