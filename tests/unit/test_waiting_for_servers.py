"""How a caller learns that its fork server has ended."""

from __future__ import annotations

import os

from mlaunch.caller import fork_server


def test_a_caller_that_waits_for_any_child() -> None:
    """It may be faster than we, who then do not know how the fork server ended."""
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    wait = fork_server._Waiter(pid)
    os.waitpid(pid, 0)
    assert (wait(60.0), wait(0.0)) == (0, 0)
