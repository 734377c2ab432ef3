"""What the caller is told of the fate of ranks that stay."""

from __future__ import annotations

from collections.abc import Sequence

from mlaunch.base.errors import RanksLost, report_of
from mlaunch.caller.settle import add_note

_STAYED = "the ranks are in step and stay, with what they hold"
_GONE = "the ranks were ended ({why}); what they held is lost, and the next call starts fresh ones{doing}"
_OUT_OF_STEP = "not all of them came back in step"


def add_fate(error: BaseException, why: str, doing: Sequence[str] = ()) -> None:
    """Notes on the error of a call what has become of the ranks. ``why`` they were lost; "": they were not.

    ``doing``: where those were that did not come back.
    """
    add_note(error, _GONE.format(why=why, doing="".join(f"\n  {line}" for line in doing)) if why else _STAYED)


def how_lost(error: BaseException | None, server: str) -> str:
    """Says why a launch has ended that nobody ended, by its error. ``server``: how its fork server has ended, if so."""
    report = report_of(error) if error is not None else None
    if report is None or not report.failures:
        unknown = error is None or isinstance(error, KeyboardInterrupt)
        return server or (_OUT_OF_STEP if unknown else str(error).partition("\n")[0])
    cause = report.failures[0]
    return f"{cause.who} {cause.what}".partition("\n")[0] if cause.exitcode is not None else _OUT_OF_STEP


def lost(name: str, why: str) -> RanksLost:
    """Returns the error of a call whose ranks are gone."""
    return RanksLost(f"{name} was not run, since its ranks are gone: {why}")
