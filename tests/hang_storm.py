"""The causes of ``tests/contract/test_hangs.py`` and ``tests/hang_scenes.py``, many times: whether why() is right.

    python -m tests.hang_storm [runs of each] [causes]

A sentence is right if it comes within a few seconds, names who holds up whom and each line, and then stays the same.
"longest" is the longest that one answer took.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from mlaunch import Run, launcher
from tests.contract.test_hangs import CASES, be_slow, cross, hold_up
from tests.hang_scenes import SCENES

_SAME, _MOST = 3, 200  # looks
_BETWEEN = 0.1  # seconds


@dataclass
class Answers:
    """What came of them."""

    runs: int = 0
    right: int = 0
    longest: float = 0.0  # seconds
    wrong: list[str] = field(default_factory=list)

    def take(self, name: str, pattern: str, run: Run) -> None:
        """Asks until the sentence stays."""
        said: list[str] = []
        right = 0
        while right < _SAME and len(said) < _MOST:
            signal.sigtimedwait([], _BETWEEN)
            begun = time.monotonic()
            said.append(run.why())
            self.longest = max(self.longest, time.monotonic() - begun)
            right = right + 1 if re.match(pattern, said[-1]) else 0
        self.runs += 1
        self.right += right == _SAME
        self.wrong += [] if right == _SAME else [f"{name}: {said[-1]}"]


def storm(runs: int, names: Collection[str] = ()) -> Answers:
    """Makes the runs, one after the other."""
    answers = Answers()
    ways: dict[str, tuple[str, int, Callable[..., object], tuple[object, ...]]] = {
        cause.__name__: (pattern, 3, cause if cause in {cross, be_slow} else hold_up, (cause,))
        for cause, pattern in CASES.items()
    }
    ways |= {name: (scene.said, scene.ranks, scene.function, ()) for name, scene in SCENES.items()}
    for name in [name for name in ways if not names or name in names]:
        pattern, ranks, function, arguments = ways[name]
        for _ in range(runs):
            run = launcher(function, ranks, device_type="cpu", grace_period=0.2, progress=False).submit(*arguments)
            answers.take(name, pattern, run)
            run.cancel()
    return answers


def main(runs: int = 20, *names: str) -> None:
    found = storm(runs, names)
    print(f"{found.right} of {found.runs} right, longest {found.longest:.2f} s", *found.wrong, sep="\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
