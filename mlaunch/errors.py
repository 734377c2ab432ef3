"""What a failed launch raises: the names that users catch, and what programs read of it."""

from __future__ import annotations

from typing import Any

from mlaunch.base import failure_data
from mlaunch.base.exceptions import LaunchError, LaunchTimeout, RankFailure, RanksLost, report_of
from mlaunch.base.frames import is_ours
from mlaunch.base.misuse import is_misuse

__all__ = ["LaunchError", "LaunchTimeout", "RankFailure", "RanksLost", "as_dict", "report_of"]


def as_dict(error: BaseException) -> dict[str, Any]:
    """Return what a call raised as programs read it, ready for JSON.

    Of a rank's own exception it is the launch's report, which is the exception's cause; of misuse and of Ctrl-C a
    record of the same fields. ``docs/schema.json`` has them (``failure``).
    """
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
