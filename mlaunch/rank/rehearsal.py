"""What a rank that was prepared does once, for nothing, while nobody waits for it: a call.

The first time is the slow one. A forked process copies each page that it writes to, some 300 for a small call, and
Python and torch prepare much where they are first used.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from mlaunch.protocol import calls, payload
from mlaunch.protocol.calls import Call
from mlaunch.protocol.messages import Answer, Kind, Phase
from mlaunch.protocol.payload import Payload
from mlaunch.rank import remote_error, step

if TYPE_CHECKING:
    import torch

_ROOM = 1 << 20  # bytes: all that is answered here is inline


def rehearse(bound: torch.device) -> None:
    """Receives a call, takes part in an operation, answers with a value, and with an exception. Collective."""
    import torch.distributed as dist

    call: Call = Payload(pickle.dumps(Call(calls.portable(_fail), (), {}))).read()
    if dist.get_backend() == "gloo":  # others may do much at their first operation, or offer none for a CPU
        step.meet(bound)
    _answer(Kind.VALUE, 0.0)
    try:
        calls.resolve(call.function)(*call.args, **call.kwargs)
    except ValueError as error:
        _answer(Kind.ERROR, remote_error.describe(error, Phase.RUNNING, "cpu", catchable=True))


def _answer(kind: Kind, content: object) -> None:
    pickle.dumps(Answer(0, 0, kind, False, "", payload.write(-1, content, to_caller=True, most=_ROOM)))


def _fail() -> None:
    raise ValueError("a rehearsal")
