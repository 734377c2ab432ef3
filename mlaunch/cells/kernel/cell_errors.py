"""How a cell shows an exception of its ranks: the cause, with the lines of the cell, and no frame of mlaunch."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

from mlaunch.base.exceptions import is_misuse, report_of
from mlaunch.caller.report import notebook


def shown_in_cell(error: BaseException) -> BaseException:
    """Return an exception for which IPython shows the ranks' report in place of the frames of the magic.

    IPython calls the ``_render_traceback_`` of an exception that has one.
    """
    lines = traceback_lines(error)
    if not lines:
        return error
    BaseException.__setattr__(error, "_render_traceback_", lambda: lines)  # a class may refuse attributes
    return error.with_traceback(None)


def traceback_lines(error: BaseException) -> list[str]:
    """Return the lines to show; none for an exception that did not come from ranks."""
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
    """Have IPython use the ``_render_traceback_`` of a SyntaxError, too; return what undoes this.

    Otherwise it would be shown below the frames of the magic.
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
