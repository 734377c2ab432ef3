"""A call that has failed is started again (``max_restarts``), within its deadline."""

from __future__ import annotations

import os
import re
import signal
import threading

import pytest
import torch.distributed as dist

from mlaunch import LaunchTimeout, launcher

pytestmark = pytest.mark.usefixtures("the_next_call_works")


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["forkserver", "fork", "spawn"])
def test_restarts(start_method: str) -> None:
    def train() -> tuple[str, str]:
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if attempt == "0" and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == "1" and dist.get_rank() == 0:
            raise ValueError("\x1b[31mnot yet\x1b[0m")
        dist.barrier()
        return attempt, os.environ["TORCHELASTIC_MAX_RESTARTS"]

    with pytest.warns(RuntimeWarning, match="is started again") as seen:
        assert launcher(train, 2, max_restarts=3, start_method=start_method)() == [("2", "3")] * 2
    first, second = [str(warning.message) for warning in seen]
    assert first.endswith("(restart 1 of at most 3): rank 1 of test_restarts.<locals>.train() was killed by SIGKILL")
    assert re.search(
        r"\(restart 2 of at most 3\): rank 0 of test_restarts\.<locals>\.train\(\) raised ValueError: not yet"
        r" \(test_restarts\.py:\d+\)$",
        second,
    )


def test_the_last_failure_is_raised() -> None:
    def train() -> None:
        raise ValueError(os.environ["TORCHELASTIC_RESTART_COUNT"])

    with pytest.warns(RuntimeWarning, match="restart 1 of at most 1"), pytest.raises(ValueError, match="1") as caught:
        launcher(train, 1, max_restarts=1)()
    assert caught.value.args == ("1",)


@pytest.mark.slow
def test_the_deadline_covers_all_restarts() -> None:
    def train() -> None:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("at once")
        threading.Event().wait()

    with pytest.warns(RuntimeWarning, match="restart 1 of at most 5"), pytest.raises(LaunchTimeout):
        launcher(train, 1, max_restarts=5, deadline=1.0)()
