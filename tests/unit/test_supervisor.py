"""The agent as it supervises its ranks: moments that only a test can choose."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mlaunch import LaunchError, LaunchTimeout, RankFailure, launcher
from mlaunch.agent import fork_ranks, stopping
from mlaunch.agent.fork_ranks import EarlyWatch
from mlaunch.agent.rank_process import RankProcess
from mlaunch.agent.supervisor import Supervisor
from mlaunch.base.deadline import NEVER
from mlaunch.base.linux import wait_readable
from mlaunch.caller.launch.outcome import Outcome
from mlaunch.caller.launch.plan import Attempt, ThisMachine, plan
from mlaunch.caller.launch.settle import settle
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.warm_server import warm_server
from mlaunch.protocol.messages import AnswerKind, DeadlinePassed, Phase, RankAnswered, ServerGone
from mlaunch.protocol.server_messages import Ready
from mlaunch.rank import for_users
from tests.contract import crashes, functions
from tests.contract.conftest import the_next_call_works

__all__ = ["the_next_call_works"]  # a fixture


def hang_at_the_end(how: str) -> int:
    rank = dist.get_rank()
    if how == "exit handler":
        atexit.register(crashes.hang)
    elif how == "thread":
        threading.Thread(target=crashes.hang).start()
    else:
        dist.destroy_process_group = crashes.hang
    return rank


@pytest.mark.parametrize(
    ("how", "place"),
    [
        ("exit handler", "in hang at crashes.py:"),
        ("thread", "waiting for threads of its own that are no daemons"),
        ("destroy_process_group", "in hang at crashes.py:"),
    ],
)
def test_a_rank_that_has_returned_and_hangs_costs_nothing(
    how: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "_LEAVING_TIMEOUT", 0.1)
    with pytest.warns(RuntimeWarning, match="ranks 0-1 had returned their values but did not end, and") as seen:
        assert launcher(hang_at_the_end, 2, grace_period=0.1, start_method="fork")(how) == [0, 1]
    [warning] = seen
    assert f"\n  ranks 0-1 were shutting down, {place}" in str(warning.message)
    assert warning.filename == __file__


def test_a_deadline_after_the_last_answer_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends what hangs, before that has had its time."""
    monkeypatch.setattr(stopping, "_LEAVING_TIMEOUT", 3600.0)
    look = Supervisor._check_deadline

    def at_once(supervisor: Supervisor) -> None:
        deadline = supervisor.launch.call.deadline
        if supervisor.launch.call.released:  # only then does it pass, however slow this machine is
            deadline.due = 0.0 if deadline.due < NEVER else NEVER
            look(supervisor)

    monkeypatch.setattr(Supervisor, "_check_deadline", at_once)
    call = launcher(hang_at_the_end, 2, grace_period=0.1, deadline=600, start_method="fork")
    with pytest.warns(RuntimeWarning, match="ranks 0-1 had returned their values but did not end"):
        assert call("exit handler") == [0, 1]


class Unreadable:
    """Cannot be unpickled by the caller."""

    def __reduce__(self) -> tuple[Any, ...]:
        return crashes.raise_error, ()


def test_a_failure_together_with_a_value_that_cannot_be_read() -> None:
    def train() -> object:
        if dist.get_rank() == 0:
            return Unreadable()
        if dist.get_rank() == 1:
            return "a value"
        assert for_users.slot is not None
        board = for_users.slot.board
        while board[0] is not Phase.RETURNED or board[1] is not Phase.RETURNED:  # they have answered
            signal.sigtimedwait([], 0.01)
        raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause") as error:
        launcher(train, 3)()
    assert isinstance(error.value.__cause__, LaunchError)
    assert error.value.__cause__.results == {1: "a value"}


def test_a_deadline_that_races_with_a_failure() -> None:
    """Whichever the agent told first is how the call ended."""
    failure, deadline = ServerGone(1, -9, 0.0), DeadlinePassed()
    of_another = RankFailure(None, 0, "passed its deadline of 1 s", subject="the call on host h2", late=True)
    for late, records in (
        (False, (failure, deadline)),
        (True, (deadline, failure)),
        (True, (deadline, failure, deadline)),  # one machine after the other
        (True, (of_another, deadline)),
    ):
        outcome = Outcome(None)  # type: ignore[arg-type]
        for record in records:
            outcome.take(record, ())
        assert outcome.late is late


@pytest.fixture
def forked_by_ones(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Has ranks of ``start_method="fork"`` forked by ones; once there is one, the agent does what it is given."""

    def arrange(does: Callable[[], object]) -> None:
        look = EarlyWatch.is_over

        def after(watch: EarlyWatch, ranks: Sequence[RankProcess]) -> bool:
            if len(ranks) == 1:
                does()
                wait_readable([watch.launcher.fileno()], min(60, watch.deadline.due - time.monotonic()))
            return look(watch, ranks)

        monkeypatch.setattr(EarlyWatch, "is_over", after)

    monkeypatch.setattr(fork_ranks, "_AT_ONCE", 1)
    return arrange


def test_a_deadline_that_passes_while_ranks_are_forked(forked_by_ones: Callable[..., None]) -> None:
    forked_by_ones(bool)
    with pytest.raises(LaunchTimeout, match="rank 0 had not returned; ranks 1-2 had not been started"):
        launcher(os.getpid, 3, start_method="fork", deadline=0.5)()


def test_ctrl_c_while_ranks_are_forked(
    forked_by_ones: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    adopt, caller = fork_ranks._adopt, os.getpid()

    def noted(*args: Any) -> RankProcess:
        rank = adopt(*args)
        (tmp_path / str(rank.rank)).touch()
        return rank

    monkeypatch.setattr(fork_ranks, "_adopt", noted)
    forked_by_ones(lambda: os.kill(caller, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        launcher(os.getpid, 3, start_method="fork")()
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


@pytest.mark.parametrize("consequence", [True, False])
def test_the_end_of_a_rank_that_had_answered_is_the_cause_of_what_looks_like_a_consequence_alone(
    consequence: bool,
) -> None:
    options = Options(n_gpus=2, device_type="cpu")
    ready = Ready("2.13", None, ("gloo",))
    outcome = Outcome(plan(options, ThisMachine(ready, lambda _environ: 0), "train()", {}, Attempt(0, None)))
    outcome.late_ends.append(RankFailure(0, 1, "exited with code 3"))
    outcome.failures.append(RankFailure(1, 2, "raised RuntimeError: closed by peer", consequence=consequence))
    with pytest.raises(LaunchError) as caught:
        settle(outcome, lambda: None).result()  # type: ignore[arg-type, return-value]
    assert [failure.rank for failure in caught.value.failures] == ([0, 1] if consequence else [1, 0])


@pytest.mark.parametrize("late", [True, False])
def test_a_list_of_values_lacks_none(late: bool) -> None:
    """Nothing has failed, and nothing was stopped; a deadline has passed while a value was on its way, perhaps."""
    ready = Ready("2.13", None, ("gloo",))
    options = Options(n_gpus=3, device_type="cpu", deadline=2.0)
    spec = plan(options, ThisMachine(ready, lambda _environ: 0), "train()", {}, Attempt(0, None))
    outcome = Outcome(spec)
    for rank in (0, 2):
        outcome.take(RankAnswered(rank, 1, AnswerKind.VALUE, consequence=False, at=0.0, data=pickle.dumps(rank)), ())
    if late:
        outcome.take(DeadlinePassed(), ())
    how = "did not finish within its deadline of 2 s" if late else "has ended"
    ended = settle(outcome, lambda: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(LaunchTimeout if late else LaunchError, match=how) as caught:
        ended.result()
    assert str(caught.value) == f"train() {how}, and no value has come from rank 1"
    assert caught.value.results == {0: 0, 2: 2}


@pytest.mark.slow
def test_a_call_right_after_the_fork_server_was_killed() -> None:
    """It may still be dying, and look alive."""
    for _ in range(5):
        os.kill(warm_server.get(os.environ).pid, signal.SIGKILL)
        assert functions.launched(1) == [10, 11]
