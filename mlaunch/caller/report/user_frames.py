"""Errors and warnings as the user sees them: from the line of the call; in IPython and Jupyter, without our frames."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from mlaunch.base.exceptions import LaunchError, hides_our_frames
from mlaunch.base.frames import is_ours
from mlaunch.caller.report import notebook

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
    if notebook.shell() is not None and not hasattr(error, _HOOK):
        BaseException.__setattr__(error, _HOOK, _Rendering())
    return error


class _Rendering:
    """A function that returns the lines that IPython shows. It does not hold the error, which would be a cycle."""

    def __call__(self) -> list[str]:
        error: Any = sys.last_value  # IPython has set it to the error that it shows
        table = notebook.shell().InteractiveTB
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
