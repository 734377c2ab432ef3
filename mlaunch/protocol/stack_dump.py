"""What ranks are doing: their Python stacks, on request, and in few words.

A rank's faulthandler answers a signal of its own by writing the stacks of all its threads into a pipe. That works
while the rank waits in C or holds the interpreter lock, and leaves alone what handlers user code has installed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

from mlaunch.caller import notebook
from mlaunch.protocol.messages import Phase, RankStacks

STACK_SIGNAL = signal.SIGRTMAX - 1  # a real-time signal, which programs hardly ever use
PATIENCE = 0.3  # seconds for all ranks together
_READ = 65536
_OURS = os.path.dirname(__file__) + os.sep
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\S+) in (?P<name>.*)$')
_RUNPY = "<frozen runpy>"
_CUT = "  ..."  # below its hundredth frame
_WRAPPERS = {"wrapper", "inner", "_wrapped", "_fn", "decorate_context", "__call__"}
# torch wraps its collectives in a function that writes their exceptions to a log.
_ERROR_LOGGER, _LOGGING = f"{os.sep}c10d_logger.py", os.path.join("logging", "__init__.py")
_LIBRARIES = (sysconfig.get_path("stdlib") + os.sep, f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
STATES = {"T": "it was stopped by a signal", "t": "a debugger holds it", "D": "it waits in the kernel"}


def answer_requests(fd: int) -> None:
    """In a rank: has faulthandler answer from now on, into ``fd``."""
    os.set_blocking(fd, False)  # a full pipe costs the end of a stack, not the rank
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)


def state_of(pid: int) -> str:
    """The kernel's letter for the process: R, S, D, T, t, Z; "" if it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fields: list[str] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0]
    return ""


def _listens(pid: int) -> bool:
    """Whether the process has a handler for our signal. It would kill another program, which a rank may have become."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)
    return False


def request(pid: int, phase: Phase) -> bool:
    """Asks a rank for its stacks; False if it could not answer now (stopped, gone, or not listening).

    One that waits in the kernel (D) mostly does so for a moment, until a page is there.
    """
    if phase is Phase.STARTING or state_of(pid) not in {"R", "S", "D"} or not _listens(pid):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
        return True
    return False


def read_some(fd: int) -> str:
    """What has arrived in the pipe; "" at its end."""
    try:
        return os.read(fd, _READ).decode(errors="replace")
    except BlockingIOError:
        return ""


def is_whole(text: str) -> bool:
    """Whether the main thread has been written down to our own frames; faulthandler writes it last."""
    return _OURS in text or text.rstrip().endswith("\n" + _CUT)


def summarise(dumps: Iterable[RankStacks]) -> list[str]:
    """One line for each group of ranks that were at the same place: "ranks 0-2, 4 were in barrier at train.py:8"."""
    groups: dict[str, list[int]] = {}
    for dump in dumps:
        groups.setdefault(_in_words(dump), []).append(dump.rank)
    ordered = sorted(groups.items(), key=lambda group: min(group[1]))
    return [f"{name_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} {words}" for words, ranks in ordered]


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 0-2, 4"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks, ', ')}"


def ranges(ranks: Iterable[int], between: str) -> str:
    """ "0-2, 4", with what stands ``between``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return between.join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _in_words(dump: RankStacks) -> str:
    frames = main_frames(dump.text)
    if dump.phase not in {
        Phase.RUNNING,
        Phase.COMMANDED,
    }:  # but it may be in user code: a __setstate__, an exit handler
        users = any(not _is_library(file) for file, _, _ in frames)
        return f"{dump.phase.value}, {in_words(frames)}" if users else str(dump.phase.value)
    if not frames:
        return f"{dump.phase.value} and did not show its stack" + (
            f" ({STATES[dump.state]})" if dump.state in STATES else ""
        )
    return in_words(frames)


def in_words(frames: Sequence[tuple[str, str, str]]) -> str:
    """Where a stack, innermost frame first, stands in user code: "in all_reduce at train.py:88", or "at In[3]:8"."""
    place = next((i for i, (file, _, _) in enumerate(frames) if not _is_library(file)), len(frames) - 1)
    file, line, name = frames[place]
    return f"in {_called(frames[:place]) or name} at {notebook.short_name(file)}:{line}"


def _called(frames: Sequence[tuple[str, str, str]]) -> str:
    """What user code had called, of the frames below it; "" if it was in no library."""
    within = ""  # the file of the wrapper
    for file, _, name in reversed(frames):
        if name in _WRAPPERS:
            within = file
        elif within.endswith(_ERROR_LOGGER) and file.endswith((_ERROR_LOGGER, _LOGGING)):
            return "a failed call of torch.distributed"
        else:
            return name
    return ""


def _is_library(file: str) -> bool:
    return any(part in file for part in _LIBRARIES) or file.startswith("<frozen")


def main_frames(text: str) -> list[tuple[str, str, str]]:
    """(file, line, name) of the main thread's frames within user code, innermost first."""
    frames: list[tuple[str, str, str]] = []
    for row in text.splitlines():
        match = _FRAME.match(row)
        if row == _CUT:
            continue
        if match is None:
            frames = []  # a new thread begins
        elif match["file"].startswith(_OURS):
            return frames
        elif match["file"] == _RUNPY:
            continue
        else:
            frames.append((match["file"], match["line"], match["name"]))
    return frames
