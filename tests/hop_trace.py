"""Notes the functions of mlaunch that each process of a launch runs, once each, in a file, while that is there.

A module for ``warm_up(preload=)``: the fork server imports it, and its forks, agents and ranks, are traced with it. It
keeps no file open, which a preload must not.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

import mlaunch

VARIABLE = "MLAUNCH_TEST_HOPS"  # the caller's pid, and the file's name
HOME = f"{Path(mlaunch.__file__).parent}{os.sep}"


def start(path: str) -> None:
    """Trace this process, and what it forks, from now on. A line is pid, depth, file, line, name."""
    seen: dict[int, set[CodeType]] = {}  # by process

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(HOME):
            return
        here = seen.setdefault(os.getpid(), set())
        if code in here:
            return
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        here.add(code)
        file = code.co_filename.removeprefix(HOME)
        line = f"{os.getpid()} {_depth(frame)} {file} {code.co_firstlineno} {code.co_name}\n"
        os.write(fd, line.encode())
        os.close(fd)

    threading.setprofile(note)
    sys.setprofile(note)


def stop() -> None:
    """Trace no more."""
    sys.setprofile(None)
    threading.setprofile(None)


def _depth(frame: FrameType) -> int:
    """Return how many functions of ours have called this one."""
    depth, caller = 0, frame.f_back
    while caller is not None:
        depth += caller.f_code.co_filename.startswith(HOME)
        caller = caller.f_back
    return depth


if VARIABLE in os.environ and not os.environ[VARIABLE].startswith(f"{os.getpid()}:"):  # the caller starts it itself
    start(os.environ[VARIABLE].partition(":")[2])
