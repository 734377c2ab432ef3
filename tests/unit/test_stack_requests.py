"""Which ranks are asked for their stacks by a signal."""

from __future__ import annotations

import os
import signal

import pytest

from mlaunch.agent.rank_process import request_stacks
from mlaunch.base import frames
from mlaunch.protocol.messages import Phase
from tests.contract import crashes


@pytest.mark.parametrize(("number", "asked"), [(signal.SIGSTOP, False), (signal.SIGCONT, True)])
def test_a_stopped_rank_is_not_asked_for_its_stacks(number: int, asked: bool) -> None:
    """It could not answer, and would cost the others the time that is waited for all together."""
    child = os.fork()
    if child == 0:
        import faulthandler

        faulthandler.register(frames.STACK_SIGNAL, file=os.open(os.devnull, os.O_WRONLY))
        os.kill(os.getpid(), signal.SIGSTOP)
        crashes.hang()
    try:
        os.waitid(os.P_PID, child, os.WSTOPPED)
        os.kill(child, number)
        if asked:
            os.waitid(os.P_PID, child, os.WCONTINUED)
        assert request_stacks(child, Phase.RUNNING, frames.STACK_SIGNAL) is asked
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
