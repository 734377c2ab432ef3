"""Who writes to the network between the processes of an engine ``Command``."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mlaunch import LaunchError, launcher
from mlaunch.engines import Command


def work() -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


FORGED = "sent data with a wrong code: somebody on the network between the machines has changed or sent it"


@pytest.mark.nightly("nothing*", "adds*")
@pytest.mark.parametrize(
    ("attack", "words"),
    [
        ("nothing", ""),
        ("adds to what the caller says", rf"host \S+ .*was lost: .*\n  it wrote: mlaunch: the caller {FORGED}"),
        ("adds to what the member says", rf"^host \S+ {FORGED}"),
        ("changes what the member says", rf"^host \S+ {FORGED}"),
    ],
)
def test_nobody_reads_a_stranger_who_writes_to_the_wire_of_a_command(attack: str, words: str, tmp_path: Path) -> None:
    together = [sys.executable, "-m", "tests.system.wire_of_command", attack, str(tmp_path / "ran")]
    ours = launcher(work, 1, engine=Command(together), machines=2, device_type="cpu")
    if not words:
        assert ours() == [2.0, 2.0]
        return
    with pytest.raises(LaunchError, match=words):
        ours()
    assert not (tmp_path / "ran").exists()
    for thread in threading.enumerate():  # what carries the program's words ends with it, maybe after the call
        if "(_carry)" in thread.name:
            thread.join(60)
