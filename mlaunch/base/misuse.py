"""Marks errors that are the doing of whoever called this package: our own frames do not help their reader."""

from __future__ import annotations

from typing import Any, TypeVar

from mlaunch.base.exceptions import report_of
from mlaunch.base.frames import is_ours

E = TypeVar("E", bound=BaseException)

_MARK = "_mlaunch_misuse"


def misuse(error: E) -> E:
    """Marks the error, which is to be raised as if from the line that called."""
    BaseException.__setattr__(error, _MARK, True)  # a class may refuse by a __setattr__ of its own
    return error


def hides_our_frames(error: BaseException) -> bool:
    """Tells whether the error says where it comes from, so that our own frames would only stand before that."""
    return report_of(error) is not None or isinstance(error, KeyboardInterrupt) or is_misuse(error)


def is_misuse(error: BaseException) -> bool:
    """Tells whether the error is so marked."""
    return bool(getattr(error, _MARK, False))


def as_dict(error: BaseException) -> dict[str, Any]:
    """Return what a call raised as programs read it, ready for JSON.

    Of a rank's own exception it is the launch's report, which is the exception's cause; of misuse and of Ctrl-C a
    record of the same fields. ``docs/schema.json`` has them (``failure``).
    """
    from mlaunch.base import failure_data  # not needed by most calls

    report = report_of(error)
    if report is not None:
        return report.as_dict()
    kind = "failed" if isinstance(error, Exception) else "interrupted"
    kind = "misuse" if is_misuse(error) or _is_refusal(error) else kind
    known = failure_data.of_text(kind, str(error) or type(error).__name__)
    return {**known, "exception": {"type": type(error).__name__, "text": str(error)}}


def _is_refusal(error: BaseException) -> bool:
    """True for what this package itself has raised of an option."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    ours = trace is not None and is_ours(trace.tb_frame.f_code.co_filename)
    return ours and isinstance(error, TypeError | ValueError)
