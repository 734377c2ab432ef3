"""Callers in interpreters of their own, whose ranks wait for ever: for tests of who ends with whom."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tests.conftest import ROOT
from tests.imported import IMPORTED
from tests.processes import descendants

SCRIPT = """
import os, signal, sys
from mlaunch import launcher

def train():
    import torch.distributed as dist
    dist.barrier()
    if dist.get_rank() == 0:
        print("running", flush=True)
    signal.pause()

launcher(train, 2, start_method=sys.argv[1], grace_period=1)()
"""


@dataclass(frozen=True)
class Family:
    """``pids``: of the caller, the fork server and the agent, by name; ``everyone``: theirs and the ranks'."""

    process: subprocess.Popen[bytes]
    pids: dict[str, int]
    everyone: list[int]

    def wait(self) -> None:
        """Waits for the caller."""
        self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()


def start_family(start_method: str, *, under: Sequence[str] = ()) -> Family:
    """Returns once the ranks run. ``under``: a command that runs the one behind it."""
    process = subprocess.Popen(
        [*under, sys.executable if under else IMPORTED, "-c", SCRIPT, start_method],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"[0] running\n"
    [server] = descendants(process.pid)[:1]
    [agent] = descendants(server)[:1]
    everyone = [process.pid, *descendants(process.pid)]
    return Family(process, {"caller": process.pid, "fork server": server, "agent": agent}, everyone)
