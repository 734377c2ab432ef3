"""What a cell shows of an exception of its ranks: the cause, with the lines of the cell, and no frame of ours."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

from mlaunch.base.exceptions import report_of
from mlaunch.base.misuse import is_misuse
from mlaunch.caller.report import notebook


def told_in_cell(error: BaseException) -> BaseException:
    """Lets IPython show what ranks report, in place of the frames by which the magic was called.

    IPython asks an exception for ``_render_traceback_``, where there is one.
    """
    lines = traceback_lines(error)
    if not lines:
        return error
    BaseException.__setattr__(error, "_render_traceback_", lambda: lines)  # a class may refuse attributes
    return error.with_traceback(None)


def traceback_lines(error: BaseException) -> list[str]:
    """Returns what is to be shown; nothing for what did not come from ranks."""
    report = report_of(error)
    notes = [str(note) for note in getattr(error, "__notes__", [])]
    if report is None and isinstance(error, SyntaxError) and is_misuse(error):
        return notebook.complete("".join(traceback.format_exception_only(error))).splitlines()
    if report is not None:
        first = str(report) if report is not error else f"{type(error).__name__}: {report}"
        return [first, *(note for note in notes if not note.startswith("raised by "))]
    if is_misuse(error) or isinstance(error, KeyboardInterrupt):
        return [f"{type(error).__name__}: {error}".removesuffix(": "), *notes]
    return []


def show_syntax_errors(shell: Any) -> Callable[[], None]:
    """Lets IPython show a SyntaxError as other exceptions, by its ``_render_traceback_``; returns what takes that back.

    Else it would be shown below the frames of the magic.
    """
    original = shell.showsyntaxerror

    def show(*args: Any, **options: Any) -> None:
        error = sys.exc_info()[1]
        render = getattr(error, "_render_traceback_", None)
        if render is None:
            original(*args, **options)
        else:
            shell._showtraceback(type(error), error, render())

    shell.showsyntaxerror = show

    def restore() -> None:
        shell.showsyntaxerror = original

    return restore
