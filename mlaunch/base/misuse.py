"""Errors of the code that calls this package: frames of mlaunch would not help their reader."""

from __future__ import annotations

from typing import Any, TypeVar

from mlaunch.base.exceptions import report_of
from mlaunch.base.frames import is_ours

E = TypeVar("E", bound=BaseException)

_MARK = "_mlaunch_misuse"


def misuse(error: E) -> E:
    """Mark the error, to be raised as if from the line of the call."""
    BaseException.__setattr__(error, _MARK, True)  # a class may refuse by a __setattr__ of its own
    return error


def hides_our_frames(error: BaseException) -> bool:
    """True if the error says by itself where it comes from, so that frames of mlaunch would only be in the way."""
    return report_of(error) is not None or isinstance(error, KeyboardInterrupt) or is_misuse(error)


def is_misuse(error: BaseException) -> bool:
    """True if ``misuse`` has marked the error."""
    return bool(getattr(error, _MARK, False))


def as_dict(error: BaseException) -> dict[str, Any]:
    """Return the error of a call for programs, ready for JSON.

    For a rank's own exception this is the launch's report, which is the exception's cause; for misuse and Ctrl-C, a
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
    """True if this package has raised it, about an option."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    ours = trace is not None and is_ours(trace.tb_frame.f_code.co_filename)
    return ours and isinstance(error, TypeError | ValueError)
