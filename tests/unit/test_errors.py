"""What errors carry with them: the report of their launch, and whose doing they are."""

from __future__ import annotations

import pickle
import re
import traceback
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlaunch.base.exceptions import LaunchError, LaunchTimeout, RankFailure, RanksLost, is_misuse, misuse, report_of
from mlaunch.caller.launch.outcome import Outcome
from mlaunch.caller.report.failure_text import in_order
from mlaunch.protocol.messages import DeadlinePassed, Phase
from mlaunch.rank import remote_error


def raised_from(cause: BaseException | None) -> ValueError:
    error = ValueError("no such luck")
    error.__cause__ = cause
    return error


def test_the_report_of_an_error() -> None:
    for report in (LaunchError("one"), LaunchTimeout("late")):
        assert report_of(report) is report
        assert report_of(raised_from(report)) is report


@pytest.mark.parametrize("cause", [None, OSError("a reason of one's own")])
def test_an_error_of_ones_own_has_no_report(cause: BaseException | None) -> None:
    """Its traceback must stay: see ``launcher.__call__``."""
    assert report_of(raised_from(cause)) is None


@pytest.mark.parametrize("kind", [LaunchError, LaunchTimeout, RanksLost])
def test_a_report_travels_whole(kind: type[LaunchError]) -> None:
    """From a launch inside a rank, say."""
    report = kind("one", [RankFailure(0, 1, "raised ValueError")], {1: "value"}, {2: "stack"})
    arrived = pickle.loads(pickle.dumps(report))
    assert type(arrived) is kind
    assert (str(arrived), arrived.failures) == ("one", report.failures)
    assert (arrived.results, arrived.stacks) == ({1: "value"}, {2: "stack"})


class Refuses(AttributeError):
    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError(f"{name} is not to be set")


def test_an_error_that_refuses_attributes_is_marked_as_others_are() -> None:
    assert is_misuse(misuse(Refuses()))
    assert not is_misuse(Refuses())


def lose_a_peer(
    cause: BaseException | None = None, *, module: str = "torch.distributed", file: str = __file__
) -> RuntimeError:
    """Returns what torch raises in a rank whose peer has died."""
    raising = "raise RuntimeError('Connection closed by peer [127.0.0.1]:1.\\nGLHF') from cause"
    try:
        exec(compile(raising, file, "exec"), {"__name__": module, "cause": cause})
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("related", ["nothing", "a cause", "a note", "code of the user's", "no file"])
def test_the_traceback_of_a_consequence_is_pythons_less_its_carets(related: str) -> None:
    """Where torch has lost a peer, and nothing else is to be told."""
    module = "train" if related == "code of the user's" else "torch.distributed"
    cause = ValueError("a reason of one's own") if related == "a cause" else None
    error = lose_a_peer(cause, module=module, file="<stdin>" if related == "no file" else __file__)
    if related == "a note":
        BaseException.__setattr__(error, "__notes__", ["remember"])  # which Python 3.10 does not print
    pythons = "".join(traceback.format_exception(error))
    ours = remote_error.describe(error, Phase.RUNNING, "cpu", catchable=False).traceback
    assert "exec(" in ours
    assert ours == (re.sub(r"^ +[~^]+\n", "", pythons, flags=re.MULTILINE) if related == "nothing" else pythons)


def test_where_all_are_consequences_what_serves_ranks_comes_first() -> None:
    """A master that somebody has stopped is told of after the exceptions of ranks that have lost their store."""
    lost = RuntimeError("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server crash?")
    remote = remote_error.describe(lost, Phase.RUNNING, "cpu", catchable=False)
    assert remote_error.is_consequence(remote)
    of_ranks = [RankFailure(rank, 1, f"raised {remote.message}", consequence=True, at=float(rank)) for rank in (0, 1)]
    of_master = RankFailure(None, 0, "was lost", subject="the master", consequence=True, at=2.0)
    assert in_order([*of_ranks, of_master]) == [of_master, *of_ranks]
    cause = RankFailure(3, 1, "raised ValueError", at=3.0)
    assert in_order([*of_ranks, of_master, cause])[0] is cause


def test_a_consequence_without_a_traceback_is_described() -> None:
    error = RuntimeError("Connection closed by peer")
    assert remote_error.describe(error, Phase.RUNNING, "cpu", catchable=False).traceback.startswith("RuntimeError:")


def test_the_deadline_is_the_cause_of_what_only_looks_like_a_consequence() -> None:
    """Ranks of one machine are ended, and one of another machine says first that they are gone."""
    for consequence in (True, False):
        outcome = Outcome(cast("Any", SimpleNamespace(local_world_size=2)))
        outcome.failures.append(RankFailure(1, 1, "raised RuntimeError", consequence=consequence))
        outcome.take(DeadlinePassed(), [])
        assert outcome.late is consequence
