"""Files in memory that several processes have mapped: none of them can end the others by shrinking one."""

from __future__ import annotations

import os
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from mlaunch.base.fds import memory_file
from mlaunch.protocol import payload
from mlaunch.protocol.board import Board


@pytest.mark.parametrize("size", [0, 1 << 20])
def test_a_board_keeps_its_size(size: int) -> None:
    board = Board.create(2)
    with pytest.raises(PermissionError):
        os.ftruncate(board.fd, size)
    board.name = "train()"
    assert board.name == "train()"
    board.close()


@pytest.mark.parametrize("size", [0, 1 << 20])
def test_a_value_that_is_mapped_keeps_its_size(size: int) -> None:
    memfd = memory_file("value")
    payload.write(memfd, ["replaced"])
    payload.write(memfd, bytes(100_000))
    assert payload.read(memfd) == bytes(100_000)
    with pytest.raises(PermissionError):
        os.ftruncate(memfd, size)
    os.close(memfd)


def test_a_file_that_others_have_made_is_read_all_the_same() -> None:
    memfd = os.memfd_create("theirs")
    payload.write(memfd, bytes(100_000))
    assert payload.read(memfd) == bytes(100_000)
    os.close(memfd)


ATTACK = """
import os, sys
import numpy as np
from mlaunch import Ranks

def keep():
    links = {}
    for fd in os.listdir("/proc/self/fd"):
        if os.path.exists(f"/proc/self/fd/{fd}"):
            links[fd] = os.readlink(f"/proc/self/fd/{fd}")
    sys.kept = [os.dup(int(fd)) for fd, link in links.items() if "memfd:" in link]
    return np.ones(100_000)

def shrink():
    refused = 0
    for fd in sys.kept:
        try:
            os.ftruncate(fd, 0)
        except PermissionError:
            refused += 1
    return refused

with Ranks(n_gpus=1) as ranks:
    [value] = ranks.run(keep)
    [refused] = ranks.run(shrink)
    print(refused >= 2, value.sum(), ranks.run(int))  # of the board and the value, at least
"""


def test_a_rank_that_shrinks_what_it_can_ends_nobody(run_script: Callable[[str], CompletedProcess[str]]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("numpy")
    done = run_script(ATTACK)
    assert done.stdout == "True 100000.0 [0]\n", (done.returncode, done.stderr)
