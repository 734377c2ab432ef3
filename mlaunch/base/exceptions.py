"""The errors of a failed launch. Users import the names from ``mlaunch`` or ``mlaunch.errors``."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlaunch.base.frozen_record import frozen_record

if TYPE_CHECKING:
    from mlaunch.base.failure_data import FailedLaunch


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
        from mlaunch.base import failure_data  # not needed by most calls

        exception = None
        if self.type_name:
            text = self.what.removeprefix(f"raised {self.type_name}").removeprefix(": ")
            exception = {"type": self.type_name, "text": text}
        return {
            "kind": failure_data.known(self.kind),
            "who": self.who,
            "what": self.what,
            "rank": self.rank,
            "host": self.host or None,
            "device": self.device or None,
            "pid": self.pid or None,
            "phase": self.phase or None,
            "exception": exception,
            "exitcode": self.exitcode,
            "frames": failure_data.named(failure_data.frames_of(self.traceback)),
            "traceback": self.traceback,
            "hints": list(self.hints),
            "consequence": self.consequence,
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
        from mlaunch.base import failure_data

        launch = self.launch or failure_data.FailedLaunch("", "", 0)
        found = [failure.as_dict() for failure in self.failures]
        return {
            **failure_data.of_text(failure_data.known(self.kind), str(self)),
            "function": launch.name,
            "launch": launch.launch_id,
            "restart_count": launch.restart_count,
            **({name: found[0][name] for name in failure_data.OF_RANK} if found else {}),
            "failures": found,
            "others": [failure_data.of_other(other) for other in launch.others],
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
