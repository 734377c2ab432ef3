"""What a supervisor has of the world, so that its policy can be tested on records and a clock that a test moves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from mlaunch.agent.supervision import ends_of_threads, stack_requests
from mlaunch.base import linux
from mlaunch.protocol.messages.launch_messages import Phase


@dataclass(frozen=True)
class System:
    """``clock`` gives monotonic seconds. ``group`` signals a process group by its leader's pid; ``process`` a rank
    alone; ``stray`` one that has left its group, by pid and pidfd. ``request`` asks for stacks by a signal; False: that
    rank cannot. ``is_ending`` tells whether a rank, by pid, is about to end; ``is_failing``, whether it has begun to
    end by failure. ``watch`` opens pidfds of two of its threads.
    """

    clock: Callable[[], float] = time.monotonic
    group: Callable[[int, int], None] = linux.signal_group
    process: Callable[[int, int], None] = os.kill
    stray: Callable[[int, int, int], None] = linux.signal_if_not_leader
    request: Callable[[int, Phase, int], bool] = stack_requests.request
    is_ending: Callable[[int, Phase], bool] = stack_requests.is_ending
    is_failing: Callable[[int], bool] = ends_of_threads.is_failing
    watch: Callable[[int], list[int]] = ends_of_threads.watch
