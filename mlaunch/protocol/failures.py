"""Records of failures, made from what a supervisor learns, for its caller and for the launch's other machines."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace

from mlaunch.base.exceptions import RankFailure, describe_exit
from mlaunch.base.text import name_some_ranks
from mlaunch.protocol.messages import AnswerKind, Cancel, RankAnswered, RankGone, RemoteError

_OUT_OF_MEMORY = ("MemoryError", "OutOfMemoryError")
_NO_MEMORY = "DefaultCPUAllocator: "  # the start of torch's RuntimeError if the host has no memory left
OOM_COUNTER = "oom_kill counter"  # of a cgroup, in the words of a hint


def from_answer(answered: RankAnswered, remote: RemoteError) -> RankFailure:
    """Return the failure of a rank that raised, or returned a value that cannot be pickled."""
    unpicklable = answered.kind is AnswerKind.UNPICKLABLE
    return RankFailure(
        rank=answered.rank,
        pid=answered.pid,
        what=f"{answered.kind.value}: {remote.message}" if unpicklable else _raised(remote),
        phase=remote.phase.value,
        host=remote.host,
        device=remote.device,
        type_name=remote.type_name,
        traceback="" if unpicklable else remote.traceback,
        consequence=answered.consequence,
        at=answered.at,
        kind="not_picklable" if unpicklable else kind_of_raised(remote.type_name, remote.message),
    )


def kind_of_raised(type_name: str, message: str) -> str:
    """Return the kind of failure for an exception of this type and message."""
    lacks_memory = type_name.endswith(_OUT_OF_MEMORY) or _NO_MEMORY in message
    return "out_of_memory" if lacks_memory else "raised"


def _raised(remote: RemoteError) -> str:
    return f"raised {remote.type_name}: {remote.message}" if remote.message else f"raised {remote.type_name}"


def from_exit(gone: RankGone, device: str = "", crash: str = "", host: str = "") -> RankFailure:
    """Return the failure of a rank that died. ``crash``: its last Python stacks. ``host``: its host; "": this one."""
    what = describe_exit(gone.exitcode, of_python=gone.of_python)
    return RankFailure(
        rank=gone.rank,
        pid=gone.pid,
        what=f"returned its value, then {what}" if gone.answered else what,
        phase=gone.phase.value,
        host=host or _host(),
        device=device,
        exitcode=gone.exitcode,
        traceback=crash,
        at=gone.at,
        hints=gone.hints,
        kind=_kind_of_end(gone),
    )


def _kind_of_end(gone: RankGone) -> str:
    if any(OOM_COUNTER in hint for hint in gone.hints):
        return "out_of_memory"
    return "killed" if gone.exitcode < 0 else "exited"


def from_server(pid: int, exitcode: int, at: float) -> RankFailure:
    return RankFailure(None, pid, describe_exit(exitcode), exitcode=exitcode, at=at, kind="lost")


def from_cancel(by_launcher: bool, cancel: Cancel | None, ranks: Sequence[int] = ()) -> RankFailure:
    """Return the failure for a launcher that cancels, or for a launcher or fork server that is gone.

    ``ranks``: the ranks of this machine, if other machines have others.
    """
    if cancel is not None:
        ended = cancel.by not in {0, signal.SIGINT}
        what = f"was ended by {signal.Signals(cancel.by).name}" if ended else "was interrupted"
        ended_by = cancel.by or signal.SIGINT
        interrupted = _of_host("the call", what, ranks, final=True, kind="interrupted")
        return replace(interrupted, exitcode=-ended_by)
    who = "the calling process" if by_launcher else "the fork server"
    return _of_host(who, "is gone", ranks, final=False, kind="lost")


def from_deadline(seconds: float | None) -> RankFailure:
    what = f"passed its deadline of {seconds:g} s"
    return replace(_of_host("the call", what, final=True, kind="deadline"), late=True)


def from_stop(pid: int, command: str = "mlaunch stop") -> RankFailure:
    """Return the failure for a launch that ``command`` ended from outside, in process ``pid``."""
    return of_run(f"was ended by {command} (pid {pid})", "stopped")


def of_run(what: str, kind: str, *, final: bool = True, waited_for: Sequence[int] = ()) -> RankFailure:
    """Return the failure that ends the whole run.

    ``kind``: from the schema. ``final``: the run is not started again. ``waited_for``: ranks that held up the others.
    """
    known = RankFailure(None, 0, what, host=_host(), subject="the run", final=final, kind=kind)
    return replace(known, waited_for=tuple(waited_for))


def _of_host(who: str, what: str, ranks: Sequence[int] = (), *, final: bool, kind: str) -> RankFailure:
    here = f" ({name_some_ranks(ranks)})" if ranks else ""
    return RankFailure(None, 0, what, host=_host(), subject=f"{who} on host {_host()}{here}", final=final, kind=kind)


def _host() -> str:
    return os.uname().nodename
