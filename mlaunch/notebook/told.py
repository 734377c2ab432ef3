"""What a cell shows of an exception of its ranks: the cause, with the lines of the cell, and no frame of ours."""

from __future__ import annotations

from mlaunch.base.exceptions import report_of
from mlaunch.base.misuse import is_misuse


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
    if report is not None:
        first = str(report) if report is not error else f"{type(error).__name__}: {report}"
        return [first, *(note for note in notes if not note.startswith("raised by "))]
    is_syntax = isinstance(error, SyntaxError)  # which IPython shows in its own way
    if (is_misuse(error) and not is_syntax) or (isinstance(error, KeyboardInterrupt) and notes):
        return [f"{type(error).__name__}: {error}".removesuffix(": "), *notes]
    return []
