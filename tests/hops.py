"""Counts the functions and files of mlaunch that a plain call runs in the caller: what a reader of it has to open.

    python -m tests.hops [--list | --order]

``--list`` prints them by file, ``--order`` as they are first called, each below its caller.

It counts those that belong to this process while the second call of a function runs (the first one starts the fork
server, too). A call and its launch are what is counted; nothing is prepared, so that no earlier call helps.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import mlaunch

HOME = f"{Path(mlaunch.__file__).parent}{os.sep}"


def hops() -> dict[CodeType, int]:
    """Returns the functions that ran, in the order of their first calls, with how many of ours had called each."""
    seen: dict[CodeType, int] = {}

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code not in seen and code.co_filename.startswith(HOME):
            seen[code] = sum(one.f_code.co_filename.startswith(HOME) for one in callers_of(frame))

    call = mlaunch.launcher(lambda number: number, n_gpus=2, device_type="cpu")
    call(0)
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call(1)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return seen


def callers_of(frame: FrameType) -> Iterator[FrameType]:
    while frame.f_back is not None:
        frame = frame.f_back
        yield frame


def main() -> None:
    os.environ["MLAUNCH_PREPARE"] = "0"
    found = hops()
    files: dict[str, list[str]] = {}
    for code, depth in found.items():
        path = code.co_filename.removeprefix(HOME)
        files.setdefault(path, []).append(f"{code.co_name}:{code.co_firstlineno}")
        if "--order" in sys.argv[1:]:
            print(f"{'  ' * depth}{code.co_name}  {path}:{code.co_firstlineno}")
    if "--list" in sys.argv[1:]:
        for path in sorted(files):
            print(path, *sorted(files[path]))
    print(f"{len(found)} functions in {len(files)} files")


if __name__ == "__main__":
    main()
