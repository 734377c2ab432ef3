"""A sweep in words: the rows and the last line of its table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mlaunch import LaunchTimeout
from mlaunch.sweeps.caller import sweep


def test_a_row_says_who_kept_a_trial_that_hung() -> None:
    def fails(text: str) -> str:
        return sweep._reason(LaunchTimeout(text))

    late = "train() did not finish within its deadline of 6 s; ranks 0-1 had not returned"
    why = "rank 1 has not entered all_reduce #1 of the default group"
    assert fails(f"{late}\n{why}\n\nmeanwhile:\n  ranks 0-1 were in f") == f"LaunchTimeout: {why}; {late}"
    assert fails(f"{late}\n\nmeanwhile:\n  ranks 0-1 were in f") == f"LaunchTimeout: ranks 0-1 were in f; {late}"
    assert fails("") == "LaunchTimeout: "


def test_the_last_line_counts_what_is_done_and_what_of_that_failed() -> None:
    def line(*states: str) -> str:
        trials: Any = [SimpleNamespace(state=state) for state in states]
        return sweep._in_one_line("train", trials, 35.0)

    assert line("returned", "running", "waiting", "waiting") == "train: 1 of 4 done, 1 running, 2 waiting  0:35"
    assert line("returned", "failed", "cancelled") == "train: 3 of 3 done (1 of them failed, 1 cancelled)  0:35"
    assert line("cancelled", "starting") == "train: 1 of 2 done (1 of them cancelled), 1 starting  0:35"
