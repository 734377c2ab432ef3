"""A failed launch for programs: the fields that ``docs/schema.json`` calls ``failure``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from mlaunch._version import SCHEMA
from mlaunch.base.frames import is_library
from mlaunch.base.frozen_record import frozen_record

# By kind: True if the call may succeed when it is started again unchanged; and what to do next.
KINDS = {
    "raised": (True, "Mend what raised: the first of frames that is in your code."),
    "out_of_memory": (True, "Use less memory on each rank (a smaller batch, more ranks), or larger devices."),
    "killed": (True, "Read hints, and the kernel's log for who sent the signal; frames has the place of a crash."),
    "exited": (True, "The function or script ended its process with this code: read what it printed."),
    "not_picklable": (False, "Return, raise or pass what can be pickled: text names the part that cannot."),
    "deadline": (False, "See in failures and others where the ranks were: mend what hangs, or give more time."),
    "stalled": (True, "See in others where the ranks were, and mend what hangs."),
    "stopped": (False, "Somebody ended it (mlaunch stop, a debugger): start it again only if that is wanted."),
    "stop_overdue": (False, "Ask mlaunch.stopping() on every rank in each step, or give a longer stop_grace."),
    "stopped_as_agreed": (True, "It was asked to stop, and has: start it again, and it goes on from what it saved."),
    "no_progress": (False, "Do not start it again unchanged: attempts failed in the same way, or came no further."),
    "interrupted": (False, "A signal or Ctrl-C ended the caller: start it again only if that is wanted."),
    "lost": (True, "A process or machine of the launch is gone: start it again, without a host that text names."),
    "not_started": (False, "No rank ran: text says what is missing."),
    "misuse": (False, "Mend the call or the command line: nothing ran."),
    "failed": (True, "Read text."),
}
# Fields of the first cause, which the failure has, too.
OF_RANK = ("rank", "host", "device", "pid", "phase", "exception", "exitcode", "frames", "hints")
_LATEST_FIRST = "most recent call first"
_FRAME = r'^[ |]*File "(?P<file>.+?)", line (?P<line>\d+)(?:,? in (?P<function>.+))?$'  # compiled if something fails


@frozen_record
class OtherRank:
    """Where a rank was that had not failed. ``frames``: (file, line, function), the innermost first."""

    rank: int
    phase: str
    doing: str  # for people: "in all_reduce at train.py:21"
    frames: Sequence[tuple[str, str, str]] = ()


@frozen_record
class FailedLaunch:
    """The launch of an error. ``name``: "train()"; ``launch_id``: as ``mlaunch ps`` shows it."""

    name: str
    launch_id: str
    restart_count: int
    others: tuple[OtherRank, ...] = ()


def known(kind: str) -> str:
    """Return the kind, or "failed" for one of another version of mlaunch on another machine."""
    return kind if kind in KINDS else "failed"


def of_text(kind: str, text: str) -> dict[str, Any]:
    """Return the fields of every failure, without those of a launch."""
    again, advice = KINDS[kind]
    nothing: dict[str, Any] = dict.fromkeys(OF_RANK)
    lists: dict[str, Any] = {"failures": [], "others": []}
    of_none = {"function": "", "launch": "", "restart_count": 0, **nothing, **lists, "log_dir": None}
    return {"schema": SCHEMA, "kind": kind, "text": text, "retry": again, "next": advice, **of_none}


def of_other(other: OtherRank) -> dict[str, Any]:
    return {"rank": other.rank, "phase": other.phase, "doing": other.doing, "frames": named(other.frames)}


def named(frames: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
    """Return frames, given as (file, line, function), by name; an unknown line is 0."""
    return [
        {
            "file": file,
            "line": int(line) if str(line).isdigit() else 0,
            "function": function,
            "library": is_library(file),
        }
        for file, line, function in frames
    ]


def frames_of(traceback: str) -> list[tuple[str, str, str]]:
    """Return the frames of the exception that a traceback ends with, or of a crash, the innermost first."""
    if _LATEST_FIRST in traceback:  # written by faulthandler, which calls the thread that crashed the current one
        _, _, current = traceback.rpartition("Current thread ")
        return _frames(current.partition("\n\n")[0])
    return _frames(traceback.rpartition("Traceback (")[2])[::-1]


def _frames(text: str) -> list[tuple[str, str, str]]:
    return [
        (found["file"], found["line"], found["function"] or "") for found in re.finditer(_FRAME, text, re.MULTILINE)
    ]
