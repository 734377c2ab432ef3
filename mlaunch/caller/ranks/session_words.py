"""What the caller is told of the fate of ranks that stay."""

from __future__ import annotations

from collections.abc import Sequence

from mlaunch.base.exceptions import RanksLost
from mlaunch.caller.launch.outcome import Outcome
from mlaunch.caller.launch.settle import Ended, add_note, reason_of
from mlaunch.caller.report.failure_text import in_order

_STAYED = "the ranks are in step and stay, with what they hold"
_GONE = "the ranks were ended ({why}); what they held is lost, and {next}{doing}"
_NEXT = {True: "the next call starts fresh ones", False: "no call starts others (restart=False)"}
CLOSED = "other code in this process closed the descriptors by which their caller speaks to them"
_OUT_OF_STEP = "not all of them came back in step"


def staying(ended: Ended) -> Ended:
    """Notes on the error of a call, if it has one, that the ranks stay."""
    if ended.error is not None:
        add_note(ended.error, _STAYED)
    return ended


def add_loss(error: BaseException, why: str, *, restart: bool, doing: Sequence[str]) -> None:
    """Notes on the error of a call that the ranks are lost. ``doing``: where those were that did not come back."""
    places = "".join(f"\n  {line}" for line in doing)
    add_note(error, _GONE.format(why=why, next=_NEXT[restart], doing=places))


def older_code(names: Sequence[str], *, shared: bool) -> str:
    """Warns of modules that have changed. ``shared``: the ranks are those of ``keep=``, which nobody can reload."""
    next_step = "fresh ranks, which have it, run the next call" if shared else "ranks.reload() loads it"
    return (
        f"the ranks run older code than the files of {', '.join(names)} hold, since they imported it before the "
        f"change; {next_step}"
    )


def how_lost(outcome: Outcome, server: str) -> str:
    """Says why a launch has ended that nobody ended; reads no value. ``server``: how its fork server ended, if so."""
    interrupt = outcome.interrupt
    if interrupt is not None:
        raised = "" if isinstance(interrupt, KeyboardInterrupt) else str(interrupt).partition("\n")[0]
        return server or raised or _OUT_OF_STEP
    if outcome.refused is not None or not outcome.failures:
        why = CLOSED if outcome.broken == CLOSED else server or reason_of(outcome)
        return why.partition("\n")[0] or _OUT_OF_STEP
    cause = in_order(outcome.failures)[0]
    if server and cause.exitcode == 0:  # the ranks were let go since it was gone
        return server
    ended = cause.exitcode is not None or cause.rank is None  # a rank, or a machine or what serves it
    return f"{cause.who} {cause.what}".partition("\n")[0] if ended else _OUT_OF_STEP


def lost(name: str, why: str) -> RanksLost:
    """Returns the error of a call whose ranks are gone."""
    return RanksLost(f"{name} was not run, since its ranks are gone: {why}")
