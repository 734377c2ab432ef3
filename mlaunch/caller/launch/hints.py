"""Advice on errors that newcomers meet in their function, chosen by torch's messages."""

from __future__ import annotations

import os
import re
import signal

from mlaunch.base.exceptions import RankFailure
from mlaunch.caller.output.console import Console
from mlaunch.protocol.board import Board

_TOLD_AT = 2  # calls
_calls: dict[str, int] = {}  # by package: how many have had to import it
_NO_MODULE = "raised ModuleNotFoundError"
_OF_THE_CALL = "the rank could not import"  # a note on the call itself gives the same advice
_TIMEOUT = (
    "a collective took longer than timeout=, an option of launcher in seconds: another rank does not take part in it "
    "(the report says what each was doing), or needs more time"
)
_ABORTED = (
    "it was in a collective: gloo ends a process so whose tensor has another shape or dtype than another rank's. "
    "With TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment (env=) torch compares them, and names both sides"
)
_STARTING = (
    'it was about to start the threads of a process group: what C++ ends so ("terminate called") is mostly that no '
    "more can be started, by a pids limit (pids.max of a container's cgroup) or by ulimit -u"
)
_NO_THREADS = (
    "no more threads or processes can be started here: raise the pids limit (pids.max of a container's cgroup), or "
    "ulimit -u"
)
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
_MAKES_GROUPS = re.compile(
    r'distributed_c10d\.py", line \d+ in (\w*process_group\w*|new_group|_new_group\w*|split_group)\n'
)
_HINTS = {
    _NO_MODULE: "ranks look for modules on the sys.path that the caller has when they start, with the caller's "
    "interpreter: put the module's directory on sys.path before, or install the module into this environment (on other "
    "machines, there)",
    "trying to initialize the default process group twice": "ranks are in a process group before the function begins: "
    "leave init_process_group out of it; a backend or timeout of your own is an option of launcher",
    "raised RuntimeError: can't start new thread": _NO_THREADS,
    "raised RuntimeError: Resource temporarily unavailable": _NO_THREADS,  # of C++, by pybind
    "raised BlockingIOError: [Errno 11] Resource temporarily unavailable": _NO_THREADS,
    "ms for send operation to complete": _TIMEOUT,
    "ms for recv operation to complete": _TIMEOUT,
    "Watchdog caught collective operation timeout": _TIMEOUT,
    "Duplicate GPU detected": "NCCL wants a GPU for each rank, and two ranks have the same one: bind each to its own "
    "(torch.cuda.set_device with LOCAL_RANK), or let ranks share one by backend='gloo'",
    "BdbQuit: its input was at its end": "a debugger found nothing to read, since ranks have no terminal: with "
    "debug=True, an option of launcher, its prompt opens where the call was made",
}


def hints_of(failure: RankFailure) -> list[str]:
    """Return advice on the failure, a line each; an empty list if none is known."""
    if failure.exitcode == -signal.SIGABRT and _COLLECTIVES in failure.traceback and not failure.hints:
        return [_STARTING if _MAKES_GROUPS.search(failure.traceback) else _ABORTED]
    known = _NO_MODULE if _OF_THE_CALL in failure.traceback else ""
    return [hint for words, hint in _HINTS.items() if words in failure.what and words != known]


def of_value(error: BaseException) -> str:
    """Return advice on what to return instead of a value that cannot be made here, if there is any."""
    if "process group has not been initialized" not in str(error):
        return ""
    return (
        "; it belongs to a process group, and there is none here: of a model in DistributedDataParallel return "
        "model.module, or its state_dict()"
    )


def tell_imports(name: str, board: Board | None) -> None:
    """Tell the user which package each call imports again: after the second slow import, once per package."""
    package, seconds = board.imported(0) if board is not None else ("", "")
    if not package:
        return
    _calls[package] = _calls.get(package, 0) + 1
    if _calls[package] == _TOLD_AT:
        console = Console()
        console.say(
            f"{name} imports {package} anew in the ranks of each call, {seconds} s in this one; to import it once: "
            f"mlaunch.warm_up(preload=[{package!r}]) before the first call, provided that it starts no thread and uses "
            f"no device"
        )
        console.close()
