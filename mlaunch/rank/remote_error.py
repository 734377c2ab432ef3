"""Makes a record of an exception that leaves its rank."""

from __future__ import annotations

import socket
import traceback

from mlaunch.base.frames import RUNPY, is_ours
from mlaunch.base.misuse import is_misuse
from mlaunch.protocol import explain
from mlaunch.protocol.messages import Phase, RemoteError

# What torch says in a rank whose peer has died. Such an error is the other rank's doing.
_CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused",
                 "remote process exited", "NCCL communicator was aborted", "Socket closed")  # fmt: skip


def describe(error: BaseException, phase: Phase, device: str, *, catchable: bool) -> RemoteError:
    """Returns the record. ``catchable``: the caller is to raise the exception itself, if it survives pickling."""
    return RemoteError(
        type_name=explain.type_name(error),
        message=_message(error),
        traceback="".join(traceback.format_exception(below_ours(error))),
        phase=phase,
        host=socket.gethostname(),
        device=device,
        pickled=explain.pickle_exception(error) if catchable else None,
    )


def is_consequence(remote: RemoteError) -> bool:
    """Tells whether it looks like the consequence of another rank's failure."""
    return any(words in remote.message for words in _CONSEQUENCES)


def below_ours(error: BaseException, *, keep_last: bool = True) -> BaseException:
    """Takes the launcher's own frames off the top of the exception's traceback.

    ``keep_last``: the last stays, lest a fault of ours has no place; but not where it is the user's (``misuse``).
    """
    keep_last = keep_last and not is_misuse(error)
    trace = error.__traceback__
    while trace is not None and (is_ours(file := trace.tb_frame.f_code.co_filename) or file == RUNPY):
        if trace.tb_next is None and keep_last:
            break
        trace = trace.tb_next
    return error.with_traceback(trace)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # the user's __str__
        return f"<its __str__ raised {type(broken).__name__}>"
