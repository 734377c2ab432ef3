"""The errors of a failed launch and of misuse, and the same for programs (``failure`` in ``docs/schema.json``).

Users import the names from ``mlaunch`` or ``mlaunch.errors``.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from mlaunch._version import SCHEMA
from mlaunch.base.frames import is_library, is_ours
from mlaunch.base.frozen_record import frozen_record


@frozen_record
class RankFailure:
    """How one rank failed.

    Attributes:
        rank: Global rank; None for a process of the launch that is no rank.
        pid: The process.
        what: "raised ValueError: boom", "was killed by SIGKILL", "exited with code 3".
        phase: What it was doing, as far as known: "running the function".
        host: Host name; empty if it is not known.
        device: "cuda:1", "cpu"; empty if it is not known.
        exitcode: As in multiprocessing, negative for a signal; None for a rank that reported an exception.
        type_name: The exception's qualified name; empty without one.
        traceback: The remote traceback; empty without one.
        consequence: It looks like the consequence of another rank's failure.
        at: The time at which the agent noticed it, in seconds of its monotonic clock.
        hints: What the system knows about the reason, a line each.
        subject: What failed, if it is no rank: another machine, the call there.
        final: The launch was ended on purpose, or its time was over: it is not started again.
        late: A deadline had passed, of the call on this machine or on another.
        kind: For programs: "raised", "killed", "out_of_memory", ...; ``docs/schema.json`` lists them.
        waited_for: The global ranks that held up the others at a deadline, a stall or a stop that is overdue; empty if
            none are known.
    """

    rank: int | None
    pid: int
    what: str
    phase: str = ""
    host: str = ""
    device: str = ""
    exitcode: int | None = None
    type_name: str = ""
    traceback: str = ""
    consequence: bool = False
    at: float = 0.0
    hints: tuple[str, ...] = ()
    subject: str = ""
    final: bool = False
    late: bool = False
    kind: str = "failed"
    waited_for: tuple[int, ...] = ()

    @property
    def who(self) -> str:
        if self.subject:
            return self.subject
        return "the rendezvous server" if self.rank is None else f"rank {self.rank}"

    @property
    def place(self) -> str:
        """The place of the failure, for people."""
        host = f"host {self.host}" if self.host else ""
        while_ = f"while {self.phase}" if self.phase else ""
        pid = f"pid {self.pid}" if self.pid else ""
        return ", ".join(part for part in (host, self.device, pid, while_) if part)

    def as_dict(self) -> dict[str, Any]:
        """Return it for programs, ready for JSON; ``docs/schema.json`` has the fields (``rank_failure``)."""
        exception = None
        if self.type_name:
            text = self.what.removeprefix(f"raised {self.type_name}").removeprefix(": ")
            exception = {"type": self.type_name, "text": text}
        return {
            "kind": known_kind(self.kind),
            "who": self.who,
            "what": self.what,
            "rank": self.rank,
            "host": self.host or None,
            "device": self.device or None,
            "pid": self.pid or None,
            "phase": self.phase or None,
            "exception": exception,
            "exitcode": self.exitcode,
            "frames": frames_by_name(frames_of_traceback(self.traceback)),
            "traceback": self.traceback,
            "hints": list(self.hints),
            "consequence": self.consequence,
            "waited_for": list(self.waited_for),
        }


class LaunchError(RuntimeError):
    """A launch failed.

    Raised if there is no exception of a rank to raise (killed, exited, not picklable); otherwise the ``__cause__`` of
    that exception.

    Attributes:
        failures: The cause first, then the others in the order in which they became known. Empty if the launch
            failed outside its ranks.
        results: The values of ranks that had finished, by global rank.
        stacks: The main threads' Python stacks of the ranks that were still at work, by global rank.
        log_dir: The directory of the ranks' output; None if it was not written, or they have printed nothing.
        kind: Of the cause, for programs: "raised", "killed", "out_of_memory", "deadline", "stopped", ...
    """

    log_dir: str | None = None
    launch: FailedLaunch | None = None  # for as_dict(); None: there was none yet
    reached: float | None = None  # the furthest step of mlaunch.report; None: none was reported
    recorded: Mapping[str, object] | None = None  # what the first rank to fail wrote into its TORCHELASTIC_ERROR_FILE

    def __init__(
        self,
        message: str,
        failures: Sequence[RankFailure] = (),
        results: Mapping[int, object] | None = None,
        stacks: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.failures = tuple(failures)
        self.results = dict(results or {})
        self.stacks = dict(stacks or {})
        self.kind: str = self.failures[0].kind if self.failures else self._usual_kind

    _usual_kind = "not_started"

    def __reduce__(self) -> tuple[object, ...]:
        # By default, pickle would call the class with only its message, and lose the failures.
        known = {"kind": self.kind, "log_dir": self.log_dir, "launch": self.launch}
        return type(self), (str(self), self.failures, self.results, self.stacks), known

    def as_dict(self) -> dict[str, Any]:
        """Return the failure for programs, ready for JSON; ``docs/schema.json`` has the fields (``failure``)."""
        launch = self.launch or FailedLaunch("", "", 0)
        found = [failure.as_dict() for failure in self.failures]
        return {
            **failure_of_text(known_kind(self.kind), str(self)),
            "function": launch.name,
            "launch": launch.launch_id,
            "restart_count": launch.restart_count,
            **({name: found[0][name] for name in OF_RANK} if found else {}),
            "failures": found,
            "others": [other_rank_data(other) for other in launch.others],
            "log_dir": self.log_dir,
        }


class LaunchTimeout(LaunchError):
    """The deadline of a call passed before its ranks had finished.

    Its ``failures`` are the ranks that had not finished: first those that held up the others; these are consequences.
    """

    _usual_kind = "deadline"


class RanksLost(LaunchError):
    """Ranks that stay are gone, and so is what they held."""

    _usual_kind = "lost"


def report_of(error: BaseException) -> LaunchError | None:
    """Return the report of the failed launch that raised this; None for another error."""
    report = error if isinstance(error, LaunchError) else error.__cause__
    return report if isinstance(report, LaunchError) else None


def describe_exit(exitcode: int, *, of_python: bool = True) -> str:
    """Return an exit code in words: "was killed by SIGKILL", "exited with code 3 (sys.exit or os._exit)"."""
    if exitcode >= 0:
        return f"exited with code {exitcode}{' (sys.exit or os._exit)' if of_python else ''}"
    try:
        return f"was killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was killed by signal {-exitcode}"


for _kind in (RankFailure, LaunchError, LaunchTimeout, RanksLost):
    _kind.__module__ = "mlaunch.errors"  # the public name, for tracebacks and pickles


# Misuse: errors of the code that calls this package. Frames of mlaunch would not help their reader.

E = TypeVar("E", bound=BaseException)

_MARK = "_mlaunch_misuse"


def misuse(error: E) -> E:
    """Mark the error, to be raised as if from the line of the call."""
    BaseException.__setattr__(error, _MARK, True)  # a class may refuse by a __setattr__ of its own
    return error


def hides_our_frames(error: BaseException) -> bool:
    """True if the error says by itself where it comes from, so that frames of mlaunch would only be in the way."""
    return report_of(error) is not None or isinstance(error, KeyboardInterrupt) or is_misuse(error)


def is_misuse(error: BaseException) -> bool:
    """True if ``misuse`` has marked the error."""
    return bool(getattr(error, _MARK, False))


def as_dict(error: BaseException) -> dict[str, Any]:
    """Return the error of a call for programs, ready for JSON.

    For a rank's own exception this is the launch's report, which is the exception's cause; for misuse and Ctrl-C, a
    record of the same fields. ``docs/schema.json`` has them (``failure``).
    """
    report = report_of(error)
    if report is not None:
        return report.as_dict()
    kind = "failed" if isinstance(error, Exception) else "interrupted"
    kind = "misuse" if is_misuse(error) or _is_refusal(error) else kind
    known = failure_of_text(kind, str(error) or type(error).__name__)
    return {**known, "exception": {"type": type(error).__name__, "text": str(error)}}


def _is_refusal(error: BaseException) -> bool:
    """True if this package has raised it, about an option."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    ours = trace is not None and is_ours(trace.tb_frame.f_code.co_filename)
    return ours and isinstance(error, TypeError | ValueError)


# For programs

# By kind: True if the call may succeed when it is started again unchanged; and what to do next.
KINDS = {
    "raised": (True, "Fix what raised: the first of frames that is in your code."),
    "out_of_memory": (True, "Use less memory on each rank (a smaller batch, more ranks), or larger devices."),
    "killed": (True, "Read hints, and the kernel's log for who sent the signal; frames has the place of a crash."),
    "exited": (True, "The function or script ended its process with this code: read what it printed."),
    "not_picklable": (False, "Return, raise or pass what can be pickled: text names the part that cannot."),
    "deadline": (False, "See in failures and others where the ranks were: fix what hangs, or give more time."),
    "stalled": (True, "See in others where the ranks were, and fix what hangs."),
    "stopped": (False, "Somebody ended it (mlaunch stop, a debugger): start it again only if that is wanted."),
    "stop_overdue": (False, "Call mlaunch.stopping() on every rank in each step, or give a longer stop_grace."),
    "stopped_as_agreed": (True, "It stopped as it was asked to: start it again, and it continues from what it saved."),
    "no_progress": (False, "Do not start it again unchanged: attempts failed in the same way, or got no further."),
    "interrupted": (False, "A signal or Ctrl-C ended the caller: start it again only if that is wanted."),
    "lost": (True, "A process or machine of the launch is gone: start it again, without a host that text names."),
    "not_started": (False, "No rank ran: text says what is missing."),
    "misuse": (False, "Fix the call or the command line: nothing ran."),
    "failed": (True, "Read text."),
}
# Fields of the first cause, which the failure has, too.
OF_RANK = ("rank", "host", "device", "pid", "phase", "exception", "exitcode", "frames", "hints", "waited_for")
_LATEST_FIRST = "most recent call first"
# Compiled if something fails.
_TRACEBACK_FRAME = r'^[ |]*File "(?P<file>.+?)", line (?P<line>\d+)(?:,? in (?P<function>.+))?$'


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


def known_kind(kind: str) -> str:
    """Return the kind, or "failed" for one of another version of mlaunch on another machine."""
    return kind if kind in KINDS else "failed"


def failure_of_text(kind: str, text: str) -> dict[str, Any]:
    """Return the fields of every failure, without those of a launch."""
    again, advice = KINDS[kind]
    nothing: dict[str, Any] = dict.fromkeys(OF_RANK)
    lists: dict[str, Any] = {"failures": [], "others": []}
    of_none = {"function": "", "launch": "", "restart_count": 0, **nothing, **lists, "log_dir": None}
    return {"schema": SCHEMA, "kind": kind, "text": text, "retry": again, "next": advice, **of_none}


def other_rank_data(other: OtherRank) -> dict[str, Any]:
    return {"rank": other.rank, "phase": other.phase, "doing": other.doing, "frames": frames_by_name(other.frames)}


def frames_by_name(frames: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
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


def frames_of_traceback(traceback: str) -> list[tuple[str, str, str]]:
    """Return the frames of the exception that a traceback ends with, or of a crash, the innermost first."""
    if _LATEST_FIRST in traceback:  # written by faulthandler, which calls the thread that crashed the current one
        _, _, current = traceback.rpartition("Current thread ")
        return _frames_in(current.partition("\n\n")[0])
    return _frames_in(traceback.rpartition("Traceback (")[2])[::-1]


def _frames_in(text: str) -> list[tuple[str, str, str]]:
    return [
        (found["file"], found["line"], found["function"] or "")
        for found in re.finditer(_TRACEBACK_FRAME, text, re.MULTILINE)
    ]
