"""The causes of ``tests/contract/test_hangs.py``, many times: whether the culprit is named, and how soon.

    python -m tests.hang_storm [runs of each] [causes]

Each run is asked ``why()`` once it says the same three times. "right" counts the answers that name the rank, what it
does and its line; "longest" is the longest that one took.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from mlaunch import launcher
from mlaunch.caller.many.run_future import Run
from tests.contract.test_hangs import CASES, be_slow, cross, hold_up

_SAME, _MOST = 3, 600  # looks
_BETWEEN = 0.1  # seconds


@dataclass
class Answers:
    """What came of them."""

    runs: int = 0
    right: int = 0
    longest: float = 0.0  # seconds
    wrong: list[str] = field(default_factory=list)

    def take(self, cause: Callable[..., Any], said: str, seconds: float) -> None:
        self.runs += 1
        self.longest = max(self.longest, seconds)
        if re.match(CASES[cause], said):
            self.right += 1
        else:
            self.wrong.append(f"{cause.__name__}: {said}")


def _starts(said: str) -> bool:
    """Tells whether that is said of ranks that are on their way: of which one is not in its function, or not beyond the
    first barrier."""
    return not said or said.startswith("no rank waits") or any(word in said for word in ("receiving", "barrier #1 of"))


def settled(run: Run) -> None:
    """Waits until its ranks have come to where they stay."""
    said: list[str] = []
    while len(said) < _MOST and (len(said) < _SAME or _starts(said[-1]) or len({*said[-_SAME:]}) > 1):
        signal.sigtimedwait([], _BETWEEN)
        said.append(re.sub(r"py:\d+", "", run.why()))


def storm(runs: int, names: Collection[str] = ()) -> Answers:
    """Makes the runs, one after the other."""
    answers = Answers()
    for cause in [cause for cause in CASES if not names or cause.__name__ in names]:
        for _ in range(runs):
            function = cause if cause in {cross, be_slow} else hold_up
            run = launcher(function, 3, grace_period=0.2, progress=False).submit(cause)
            settled(run)
            begun = time.monotonic()
            answers.take(cause, run.why(), time.monotonic() - begun)
            run.cancel()
    return answers


def main(runs: int = 20, *names: str) -> None:
    found = storm(runs, names)
    print(f"{found.right} of {found.runs} right, longest {found.longest:.2f} s", *found.wrong, sep="\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
