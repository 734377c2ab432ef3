"""What each attempt of a call with restarts is given."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from mlaunch import LaunchError
from mlaunch.base.exceptions import RankFailure
from mlaunch.caller.launch.plan import Attempt, ThisMachine, plan
from mlaunch.caller.launch.restarts import with_restarts
from mlaunch.caller.options.launch_options import Options
from mlaunch.protocol.messages.launch_messages import Ready


def test_a_restart_has_what_is_left_of_the_deadline() -> None:
    given: list[float | None] = []

    def attempt(left: float | None, _restart_count: int) -> Any:
        given.append(left)
        return SimpleNamespace(error=LaunchError("no such luck", [RankFailure(0, 1, "raised")], {}, {}))

    with_restarts(attempt, "train()", 60.0, 2, lambda _why: None)
    assert (len(given), given[0]) == (3, 60.0)
    assert all(later < earlier for earlier, later in itertools.pairwise(given))  # type: ignore[operator]
    machine = ThisMachine(Ready("2.13", None, ("gloo",)), lambda _environ: 0)
    spec = plan(Options(n_gpus=1, deadline=60.0), machine, "train()", {}, Attempt(1, 5.0))
    assert (spec.deadline, spec.seconds) == (60.0, 5.0)


def test_a_launch_that_somebody_has_ended_is_not_started_again() -> None:
    """On another machine, say."""
    given: list[int] = []

    def attempt(_left: float | None, restart_count: int) -> Any:
        given.append(restart_count)
        ended = RankFailure(None, 0, "was interrupted", subject="the call on host h1", final=True)
        return SimpleNamespace(error=LaunchError("no such luck", [ended], {}, {}))

    with_restarts(attempt, "train()", None, 2, lambda _why: None)
    assert given == [0]
