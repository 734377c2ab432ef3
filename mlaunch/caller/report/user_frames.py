"""What IPython and Jupyter show of an error: the caller's own lines, not ours below them, and where to read on."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from mlaunch.base.exceptions import LaunchError
from mlaunch.base.frames import is_ours
from mlaunch.base.misuse import hides_our_frames
from mlaunch.caller.report import notebook

E = TypeVar("E", bound=BaseException)
R = TypeVar("R")
P = ParamSpec("P")

_HOOK = "_render_traceback_"  # what IPython asks an exception for, and the only thing that hides its last frame
_FUTURES = f"{os.sep}concurrent{os.sep}futures{os.sep}"
_READ_ON = "What every rank was doing stands above, where it says LaunchError."


def without_ours(error: E) -> E:
    """Returns the error, to be raised as if from the line that called: without frames so far, or of ours later on."""
    return hide_ours(error.with_traceback(None))


def raises_from_caller(function: Callable[P, R]) -> Callable[P, R]:
    """Has what the function raises for its caller's sake, or as it is interrupted, come from the line that called."""

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
    """Makes IPython, if it runs here, leave our frames out where it shows the error; returns the error."""
    if notebook.shell() is not None and not hasattr(error, _HOOK):
        BaseException.__setattr__(error, _HOOK, _Rendering())
    return error


class _Rendering:
    """Makes the lines that IPython shows. It holds no error, which would be a circle, and pickles as its class."""

    def __call__(self) -> list[str]:
        error: Any = sys.last_value  # IPython has set it to what it shows
        table = notebook.shell().InteractiveTB
        trace = _of_the_user(error.__traceback__)
        lines = list(table.structured_traceback(type(error), error, trace, tb_offset=0))
        is_shown = any(LaunchError.__name__ in line for line in lines)  # not where the user wants one line alone
        return [*lines, _READ_ON] if isinstance(error.__cause__, LaunchError) and is_shown else lines

    def __reduce__(self) -> tuple[Any, ...]:
        return _Rendering, ()


def _of_the_user(trace: TracebackType | None) -> TracebackType | None:
    """Returns the frames from the first that is not IPython's to the last that is not ours; all, if none are left."""
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
