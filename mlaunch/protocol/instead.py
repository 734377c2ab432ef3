"""What to send in the place of what belongs to one process alone."""

from __future__ import annotations

import io
import socket
import types

_RUNNING = (types.GeneratorType, types.AsyncGeneratorType)
_HERE_ALONE = (*_RUNNING, types.CoroutineType, io.IOBase, socket.socket)


def to_pass(culprit: object) -> str:
    """Says what to pass to ranks instead, as the end of a message; "" if that is not known."""
    if isinstance(culprit, _RUNNING):
        return ": pass a list of its items, or make it in the function, which each rank runs"
    if isinstance(culprit, io.IOBase):
        return ": pass its path, and open it in the function, which each rank runs"
    if isinstance(culprit, types.CoroutineType):
        return ": pass what it returns"
    return ": make it in the function, which each rank runs" if _is_of_one_process(culprit) else ""


def to_return(culprit: object) -> str:
    """Says what a rank is to return instead; "" if that is not known."""
    if isinstance(culprit, _RUNNING):
        return ": return a list of its items"
    if isinstance(culprit, io.IOBase):
        return ": return its path, or what it holds"
    return ": return what it returns" if isinstance(culprit, types.CoroutineType) else ""


def _is_of_one_process(culprit: object) -> bool:
    return isinstance(culprit, _HERE_ALONE) or type(culprit).__module__ in {"_thread", "threading", "_multiprocessing"}
