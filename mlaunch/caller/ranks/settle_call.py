"""How one call of ranks that stay has ended. Values are unpickled here, which may run user code."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

from mlaunch.base.exceptions import RanksLost, report_of
from mlaunch.caller.launch.outcome import Outcome
from mlaunch.caller.launch.settle import Ended, add_note, settle
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.protocol.payload import Payload
from mlaunch.protocol.spec import LaunchSpec


def settle_call(outcome: Outcome, report: Callable[[], LaunchReport]) -> Ended:
    """Settles a call by all that was heard of it."""
    if outcome.interrupt is not None and outcome.stacks:
        add_note(outcome.interrupt, f"{outcome.spec.call.name} was interrupted; {'; '.join(outcome.doing())}")
    try:
        return settle(outcome, report)
    finally:
        outcome.close()


def settle_lost(
    outcome: Outcome, report: Callable[[], LaunchReport], why: str, note: Callable[..., None] | None
) -> Ended:
    """Settles the call during which the ranks were lost. ``note``: adds to its error what that means."""
    try:
        ended = settle(outcome, report, lost=True)
    finally:
        outcome.close()
    if ended.error is None:
        return Ended(report, [], RanksLost(f"{outcome.spec.call.name} was ended: {why}"))
    if note is not None:
        told = str(report_of(ended.error) or "")
        note(ended.error, why, doing=[line for line in outcome.doing() if line not in told])
    return ended


def settle_values(spec: LaunchSpec, values: Sequence[bytes], report: Callable[[], LaunchReport]) -> Ended:
    """Settles a call of which nothing was noted but its values, in the order of ranks."""
    try:
        return Ended(report, [pickle.loads(value) for value in values], None)
    except (Exception, SystemExit):  # whatever a __setstate__ may raise: it will do it again where that is told
        return settle(Outcome(spec, values={rank: Payload(value) for rank, value in enumerate(values)}), report)
