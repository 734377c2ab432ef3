"""What each attempt of a call with restarts is given."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from mlaunch import LaunchError
from mlaunch.base.exceptions import RankFailure
from mlaunch.caller.fork_server import ServerGoneError
from mlaunch.caller.interrupts import carry_out
from mlaunch.caller.launch.call import TRIES, tried
from mlaunch.caller.launch.plan import Attempt, ThisMachine, plan
from mlaunch.caller.launch.start import _send_call, with_restarts
from mlaunch.caller.options.launch_options import Options
from mlaunch.protocol.calls import Call
from mlaunch.protocol.server_messages import Ready
from mlaunch.sweeps.caller import submitted_call


def test_a_restart_has_what_is_left_of_the_deadline() -> None:
    given: list[float | None] = []

    def attempt(number: Attempt) -> Any:
        yield from ()
        given.append(number.time_left)
        return SimpleNamespace(error=LaunchError("no such luck", [RankFailure(0, 1, "raised")], {}, {}))

    carry_out(with_restarts(attempt, "train()", 60.0, 2, lambda _why: None))
    assert (len(given), given[0]) == (3, 60.0)
    assert all(later < earlier for earlier, later in itertools.pairwise(given))  # type: ignore[operator]
    machine = ThisMachine(Ready("2.13", None, ("gloo",)), lambda _environ: 0)
    spec = plan(Options(n_gpus=1, deadline=60.0), machine, "train()", {}, Attempt(1, 5.0))
    assert (spec.call.deadline, spec.seconds) == (60.0, 5.0)


def test_servers_that_are_gone_before_anything_ran() -> None:
    """Another one is asked, of a call on ranks of its own and of a submitted one with ``keep=``; not for ever."""
    tries = 0

    def attempt(gone: int) -> Any:
        nonlocal tries
        yield from ()
        tries += 1
        if tries <= gone:
            raise ServerGoneError("the fork server (pid 7) was killed by SIGKILL")
        return tries

    assert carry_out(tried(functools.partial(attempt, TRIES - 1))) == TRIES
    tries = 0
    with pytest.raises(
        LaunchError, match=r"by SIGKILL; 2 others before it ended in the same way\. Look for what kills them"
    ):
        carry_out(tried(functools.partial(attempt, TRIES)))


def test_a_kept_trial_asks_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([ServerGoneError("gone"), None])

    def on_kept(*_: object) -> Any:
        yield from ()
        if error := next(ends):
            raise error
        return "its value"

    monkeypatch.setattr(submitted_call, "_on_kept_ranks", on_kept)
    course: Any = SimpleNamespace(starting=False)
    call = Call(print, (), {})
    made = submitted_call.attempt_here(Options(keep=60), call, "train()", Attempt(0, None), course)
    assert carry_out(made) == "its value"  # type: ignore[comparison-overlap]


def errors_of_attempts(*ends: LaunchError) -> tuple[list[str], LaunchError]:
    """What is told of attempts that end so, with as many restarts as there may be, and how the last one has ended."""
    told: list[str] = []
    left = iter(ends)

    def attempt(_number: Attempt) -> Any:
        yield from ()
        return SimpleNamespace(error=next(left))

    ended = carry_out(with_restarts(attempt, "train()", None, len(ends) - 1, told.append))
    return told, ended.error  # type: ignore[return-value]


def failed(what: str, step: float | None = None, **facts: Any) -> LaunchError:
    error = LaunchError(f"rank 0 of train() {what}", [RankFailure(0, 1, what, kind="raised", **facts)])
    error.reached = step
    return error


def lacks_module(line: int) -> LaunchError:
    trace = f'  File "/home/me/train.py", line {line}, in <module>\n'
    return failed("raised ImportError: no such thing", type_name="ImportError", traceback=trace)


def test_what_a_restart_does_not_mend() -> None:
    """Two attempts that end alike, by a mistake or at the same step, are enough."""
    told, error = errors_of_attempts(lacks_module(3), lacks_module(3), failed("never"))
    assert "is started again" in told[0]
    assert told[1] == (
        "train() is not started again: two attempts in a row have failed in the same way, and a third would too: "
        "raised ImportError: no such thing (train.py:3)"
    )
    assert (len(told), error.kind) == (2, "no_progress")
    told, error = errors_of_attempts(*(failed("exited with code 2", exitcode=2) for _ in range(3)))
    assert "have failed in the same way, and a third would too: exited with code 2" in told[-1]
    told, error = errors_of_attempts(*(failed("raised ValueError", step) for step in (7, 5, None, 9)))
    assert told[-1].endswith("two attempts in a row have not got beyond step 7 of mlaunch.report")
    assert (len(told), error.kind) == (3, "no_progress")
    _, error = errors_of_attempts(failed("raised ValueError", 7), failed("raised ValueError", 7), failed("died", 7))
    assert error.kind == "no_progress"  # also of the last one that there may be


def test_what_a_restart_may_mend() -> None:
    for ends in (
        [lacks_module(3), lacks_module(4), lacks_module(3)],
        [lacks_module(3), failed("was killed by SIGKILL"), lacks_module(3)],
        [failed("raised ValueError", step) for step in (1, 1, 2, 2, 3)],
        [failed("raised ValueError")] * 5,
        [failed("exited with code 3", exitcode=3)] * 3,
    ):
        told, error = errors_of_attempts(*ends)
        assert (len(told), error.kind) == (len(ends) - 1, "raised")


def test_a_launch_that_somebody_has_ended_is_not_started_again() -> None:
    """On another machine, say."""
    given: list[int] = []

    def attempt(number: Attempt) -> Any:
        yield from ()
        given.append(number.restart_count)
        ended = RankFailure(None, 0, "was interrupted", subject="the call on host h1", final=True)
        return SimpleNamespace(error=LaunchError("no such luck", [ended], {}, {}))

    carry_out(with_restarts(attempt, "train()", None, 2, lambda _why: None))
    assert given == [0]


def test_a_prepared_launch_is_among_the_servers_before_its_ranks_can_begin() -> None:
    """A daemon thread may wait just after it has sent the call: an interpreter that ends then cancels the launch."""
    steps: list[str] = []
    agent: Any = SimpleNamespace(try_send=lambda *_: steps.append("sent"))
    server: Any = SimpleNamespace(adopt=lambda _launch: steps.append("adopted"))
    machine = ThisMachine(Ready("2.13", None, ("gloo",)), lambda _environ: 0)
    _send_call(server, agent, plan(Options(n_gpus=1), machine, "int()", {}, Attempt(0, None)), Call(int, (), {}), [])
    assert steps == ["adopted", "sent"]
