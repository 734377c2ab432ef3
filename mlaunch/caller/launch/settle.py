"""The decision on what a caller gets from a launch: its values, or the exception of its first failure."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any

from mlaunch.base.exceptions import FailedLaunch, LaunchError, LaunchTimeout, OtherRank, RankFailure
from mlaunch.base.frames import main_frames, stack_text
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.text import name_ranks, name_some_ranks
from mlaunch.caller.launch.outcome import Outcome
from mlaunch.caller.report import notebook
from mlaunch.caller.report.failure_text import FailureText, doing_of, hints_of, in_order, meanwhile, of_value
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.caller.report.user_frames import hide_ours, warn_caller
from mlaunch.core.records import Need
from mlaunch.protocol import launch_files
from mlaunch.protocol.messages import Phase


@frozen_record
class Ended:
    """A launch or a call that is over. ``report`` makes its report, once; most calls' reports are never read."""

    report: Callable[[], LaunchReport]
    values: list[Any]
    error: BaseException | None  # instead of the values

    def result(self) -> list[Any]:
        """Return the values, or raise the reason why there are none."""
        try:
            if self.error is not None:
                raise self.error
            return self.values
        finally:
            del self  # otherwise the error's traceback would hold it, and what it maps would wait for the collector


Steps = Generator[Need, None, Ended]


def settle(outcome: Outcome, report: Callable[[], LaunchReport], *, lost: bool = False) -> Ended:
    """Return how the launch ended. Reads values, so it comes before the outcome is closed.

    ``lost``: the caller itself gives the reason if values are missing without a failure.
    """
    try:
        if outcome.failed:
            _raise(outcome)
        lacking: list[int] = []  # ranks that have sent neither a value nor the message that they have none
        if outcome.spec.target is None:
            lacking = sorted({*outcome.ranks_here} - outcome.values.keys() - {*outcome.silent})
        if lacking and not lost:  # without a failure, values may still be missing
            raise _lacks_values(outcome, lacking)
        values = _values(outcome)
        if outcome.late_ends or (outcome.stopped and not lacking):
            _warn_of_ends(outcome)
        return Ended(report, values, None)
    except BaseException as error:
        return Ended(report, [], hide_ours(error))


def _raise(outcome: Outcome) -> None:
    """Raise the reason why there are no values; nothing if ranks were stopped after all had returned their values."""
    if outcome.interrupt is not None:
        raise _with_results(outcome, outcome.interrupt)
    reason = reason_of(outcome)
    if outcome.refused is not None:
        kind = LaunchTimeout if outcome.refused.late else LaunchError
        raise _error(outcome, kind, reason, "not_started")
    if outcome.late and (outcome.stopped or outcome.broken):
        _raise_timeout(outcome, reason)
    if reason:
        raise _error(outcome, LaunchError, reason, "lost")
    if outcome.failures:
        _raise_failure(outcome)


def _values(outcome: Outcome) -> list[Any]:
    spec = outcome.spec
    if outcome.silent and spec.target is None:
        ranks = sorted(outcome.silent)
        warn_caller(
            f"{name_ranks(ranks)} of {spec.call.name} exited with code 0 without returning a value; "
            f"{'its result is' if len(ranks) == 1 else 'their results are'} None"
        )
    values = []
    for rank in outcome.ranks_here:
        try:
            values.append(outcome.values[rank].read() if rank in outcome.values else None)
        except (Exception, SystemExit) as error:  # whatever a __setstate__ may raise
            raise _error(
                outcome,
                LaunchError,
                f"the value that rank {rank} of {spec.call.name} returned cannot be unpickled here: "
                f"{type(error).__name__}: {str(error).rstrip('.')}{of_value(error)}",
                "not_picklable",
            ) from error
    return values


def _lacks_values(outcome: Outcome, ranks: Sequence[int]) -> LaunchError:
    spec = outcome.spec
    what = f"did not finish within its deadline of {spec.call.deadline:g} s" if outcome.late else "has ended"
    kind = LaunchTimeout if outcome.late else LaunchError
    text = f"{spec.call.name} {what}, and no value has come from {name_ranks(ranks)}"
    return _error(outcome, kind, text, "" if outcome.late else "lost")


def _warn_of_ends(outcome: Outcome) -> None:
    """Warn of ranks that had returned and then did not end well: all values are there."""
    ended: dict[str, list[int]] = {}
    for failure in outcome.late_ends:
        ended.setdefault(f"{failure.what} ({failure.place})", []).append(failure.rank or 0)
    told = [f"{name_some_ranks(ranks)} {what}" for what, ranks in ended.items()]
    if hung := sorted(outcome.stopped):
        words = "their values but did not end, and were" if len(hung) > 1 else "its value but did not end, and was"
        told.append(f"{name_some_ranks(hung)} had returned {words} ended")
    lines = [f"{outcome.spec.call.name}: {'; '.join(told)}. No value is lost", *outcome.doing()]
    lines += [f"a longer grace_period= than {outcome.spec.grace_period:g} s leaves more time to end"] if hung else []
    crash = next((failure.traceback.rstrip() for failure in outcome.late_ends if failure.traceback), "")
    warn_caller("\n  ".join([*lines, *crash.splitlines()]))


def reason_of(outcome: Outcome) -> str:
    """Return what ended the launch other than an interrupt or a rank; "" if nothing did. Does not read a value."""
    name = outcome.spec.call.name
    if outcome.refused is not None:
        return f"{name} was not started: {outcome.refused.text}"
    if outcome.late and (outcome.stopped or outcome.broken):
        return f"{name} did not finish within its deadline of {outcome.spec.call.deadline:g} s; {_who_is_late(outcome)}"
    return f"{name} was ended: {outcome.broken}" if outcome.broken and not outcome.failures else ""


def _who_is_late(outcome: Outcome) -> str:
    silent, spec = list(outcome.stopped - outcome.values.keys()), outcome.spec
    if silent:
        unstarted = range(spec.rank_start + len(outcome.started), spec.rank_start + spec.local_world_size)
        late = f"; {name_ranks(unstarted)} had not been started" if unstarted else ""
        return f"{name_ranks(silent)} had not returned{late}"
    return f"{name_ranks(list(outcome.stopped))} had returned but not ended" if outcome.stopped else outcome.broken


def _raise_timeout(outcome: Outcome, reason: str) -> None:
    from mlaunch.core.load import of_deadline  # most calls do not need it

    said, blamed = of_deadline(list(outcome.stacks.values()), outcome.values)
    lines = [reason, *said, *meanwhile(outcome.doing())]
    outcome.failures = [*_late_ranks(outcome, blamed), *outcome.failures]
    raise _error(outcome, LaunchTimeout, "\n".join(lines))


def _late_ranks(outcome: Outcome, blamed: Collection[int]) -> list[RankFailure]:
    """Return the ranks that had not finished, first those that the others waited for."""
    spec, late = outcome.spec, outcome.stopped - outcome.values.keys() or outcome.stopped
    at_deadline = f"at the deadline of {spec.call.deadline:g} s"
    what = f"had not {'ended' if late <= outcome.values.keys() else 'returned'} {at_deadline}"
    found = []
    for rank in sorted(late, key=lambda rank: (rank not in blamed, rank)):
        dump = outcome.stacks.get(rank)
        found.append(
            RankFailure(
                rank,
                started.pid if (started := outcome.started.get(rank)) is not None else 0,
                what,
                phase=dump.phase.value if dump is not None else "",
                host=outcome.hosts.get(rank, os.uname().nodename),
                device=spec.device(rank - spec.rank_start),
                traceback=stack_text(frames) if dump is not None and (frames := main_frames(dump.text)) else "",
                consequence=bool(blamed) and rank not in blamed,
                final=True,
                late=True,
                kind="deadline",
                waited_for=tuple(sorted(blamed)),
            )
        )
    return found


def _raise_failure(outcome: Outcome) -> None:
    """Raise the first failure, as the exception of its rank if that can be made here."""
    failed, ends = in_order(outcome.failures), outcome.late_ends
    # If a rank ended after it had answered, that is the cause only for the ranks that have noticed it.
    failed = [*ends, *failed] if failed[0].consequence else [*failed, *ends]
    outcome.failures = [_completed(failure) for failure in failed]
    cause = outcome.failures[0] = _with_output(outcome, outcome.failures[0])
    text = FailureText(outcome.spec.call.name, outcome.failures, outcome.doing())
    report = _error(outcome, LaunchTimeout if cause.late else LaunchError, str(text))
    remote = outcome.raised.get(cause.rank) if cause.rank is not None else None
    if remote is None or remote.pickled is None:
        raise report
    try:
        # The user catches what the rank raised, by its own class; the report is its cause.
        error: BaseException = pickle.loads(remote.pickled)
    except (Exception, SystemExit):  # its class does not exist here, or cannot be made: the text has to do
        raise report from None
    add_note(error, f"raised by {cause.who} of {outcome.spec.call.name} ({cause.place})")
    for hint in hints_of(cause):
        add_note(error, hint)
    raise error from report


def _error(outcome: Outcome, kind: type[LaunchError], text: str, word: str = "") -> LaunchError:
    """Return the error of a launch. ``word``: its kind for programs; "": that of the first failure."""
    stacks = {rank: dump.text for rank, dump in outcome.stacks.items() if dump.text}
    error = kind(text, outcome.failures, _results(outcome), stacks)
    error.log_dir = launch_files.kept(outcome.log_dir)
    error.kind = word or error.kind
    error.launch = _launch_of(outcome)
    cause = outcome.failures[0].rank if outcome.failures else None
    error.recorded = outcome.recorded.get(cause) if cause is not None else None
    return error


def _launch_of(outcome: Outcome) -> FailedLaunch:
    spec, failed = outcome.spec, {failure.rank for failure in outcome.failures}
    others = [
        OtherRank(dump.rank, dump.phase.value, doing_of(dump), tuple(main_frames(dump.text)))
        for dump in outcome.stacks.values()
        if dump.rank not in failed
    ]
    done = {rank: "had returned its value" for rank in outcome.values} | {rank: "had ended" for rank in outcome.silent}
    known = {*failed, *(other.rank for other in others)}
    others += [OtherRank(rank, Phase.RETURNED.value, said) for rank, said in done.items() if rank not in known]
    return FailedLaunch(
        spec.call.name, spec.launch_id, spec.restarts.count, tuple(sorted(others, key=lambda one: one.rank))
    )


def _with_results(outcome: Outcome, interrupt: BaseException) -> BaseException:
    """Return the interrupt with the values of the ranks, if all had returned, so that the work is not lost."""
    if len(outcome.values) == outcome.spec.local_world_size:
        with contextlib.suppress(AttributeError):  # a class with slots, raised by another signal's handler
            interrupt.results = _results(outcome)  # type: ignore[attr-defined]  # as LaunchError has them
            add_note(interrupt, f"all ranks of {outcome.spec.call.name} had returned their values: they are in the "
                                f"exception's .results, by rank")  # fmt: skip
    return interrupt


def _results(outcome: Outcome) -> dict[int, Any]:
    results = {}
    for rank, value in outcome.values.items():
        with contextlib.suppress(Exception, SystemExit):  # what a __setstate__ may raise; the failure is reported
            results[rank] = value.read()
    return results


def _with_output(outcome: Outcome, cause: RankFailure) -> RankFailure:
    """Add the place of the rank's output, if it was kept here."""
    spec = outcome.spec
    if outcome.log_dir is None or cause.rank is None or not 0 <= cause.rank - spec.rank_start < spec.local_world_size:
        return cause
    name = cause.rank if spec.target is None else cause.rank - spec.rank_start
    where = launch_files.kept(launch_files.directory_of(outcome.log_dir, spec.restarts.count, name))
    if where is None:  # it has printed nothing
        return cause
    return dataclasses.replace(cause, hints=(*cause.hints, f"its output is in {where}"))


def _completed(failure: RankFailure) -> RankFailure:
    hints = (*failure.hints, *hints_of(failure))
    return dataclasses.replace(failure, traceback=notebook.complete(failure.traceback), hints=hints)


def add_note(error: BaseException, text: str) -> None:
    """Add a note, which an exception with a ``__setattr__`` of its own may refuse, and Python 3.10 lacks."""
    BaseException.__setattr__(error, "__notes__", [*getattr(error, "__notes__", []), text])
