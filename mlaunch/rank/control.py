"""The control thread of a rank, which answers the agent whatever the main thread waits in.

    agent --Question--> control thread --Told--> agent

Between two questions it sleeps in the kernel. It cannot answer while C code holds the interpreter lock, nor in a
process that is stopped (SIGSTOP): the agent draws its conclusion from that, too.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal wraps in enumerations, which take 50 times as long
import _thread
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from mlaunch.protocol import payload
from mlaunch.protocol.channel import Channel, assert_never
from mlaunch.protocol.messages import Ask, ControlHears, ControlSays, ForPart, Question, Told
from mlaunch.rank import in_step

# A fault of the thread kills a process that blocks its signal before faulthandler has written a stack.
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
_NOT_FAULTS = signal.valid_signals() - _FAULTS


def start(channel: Channel[ControlHears, ControlSays]) -> None:
    """Start the thread, unknown to ``threading``: a program may count its threads, and wait for them at its end."""
    _thread.start_new_thread(_answer_all, (channel,))


def _answer_all(channel: Channel[ControlHears, ControlSays]) -> None:
    # A signal that the main thread blocks, in order to wait for it, would come here, and end the process.
    _signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FAULTS)
    # The agent is gone, or the function has closed our descriptor: both are reported elsewhere.
    with contextlib.suppress(EOFError, OSError):
        while True:
            record, fds = channel.receive()
            match record:
                case Question(number, about, call):
                    payload.write(fds[0], _answer(about, call))
                    os.close(fds[0])
                    channel.send(Told(number))
                case ForPart(feature, _, word):
                    _module_of(feature).hear(word, *fds)
                case _:
                    assert_never(record)


def _place() -> list[tuple[str, str, str]]:
    """Return (file, line, name) of the main thread's frames above the launcher's, innermost first.

    This interrupts nothing in that thread; the signal by which agents ask for stacks would.
    """
    return in_step.user_frames(sys._current_frames().get(threading.main_thread().ident or 0))


def _module_of(feature: str) -> Any:
    """Return the feature's module for ranks."""
    from mlaunch.core.load import module_of  # which most ranks do not need

    return module_of(feature, "rank")


def _turns() -> int:
    from mlaunch.core.load import turns_here

    return turns_here()


def _answer(about: Ask | ForPart | bytes, call: int) -> object:
    if isinstance(about, ForPart):
        return _module_of(about.feature).answer(about.word)
    if about is Ask.NUMBERS:
        return in_step.since_the_call(call)
    return _ANSWERS[about]()


_ANSWERS: dict[object, Callable[[], object]] = {Ask.ENTERED: in_step.entered, Ask.TURNS: _turns, Ask.PLACE: _place}
