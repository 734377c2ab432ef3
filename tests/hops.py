"""Counts the functions and files of mlaunch that a plain call runs in the caller: what a reader of it has to open.

    python -m tests.hops [--list]

It counts those that belong to this process while the second call of a function runs (the first one starts the fork
server, too). A call and its launch are what is counted; nothing is prepared, so that no earlier call helps.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

import mlaunch

HOME = f"{Path(mlaunch.__file__).parent}{os.sep}"


def hops() -> dict[str, set[str]]:
    """Returns the functions that ran, by file, relative to the package."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            seen.add(frame.f_code)

    call = mlaunch.launcher(lambda number: number, n_gpus=2, device_type="cpu")
    call(0)
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call(1)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    found: dict[str, set[str]] = {}
    for code in seen:
        if code.co_filename.startswith(HOME):
            found.setdefault(code.co_filename.removeprefix(HOME), set()).add(f"{code.co_name}:{code.co_firstlineno}")
    return found


def main() -> None:
    os.environ["MLAUNCH_PREPARE"] = "0"
    found = hops()
    if "--list" in sys.argv[1:]:
        for path in sorted(found):
            print(path, *sorted(found[path]))
    print(f"{sum(map(len, found.values()))} functions in {len(found)} files")


if __name__ == "__main__":
    main()
