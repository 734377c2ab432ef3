"""The control thread of a rank: it answers the agent while the main thread waits in a collective, or in anything else.

    agent --Question--> control thread --Told--> agent

It sleeps in the kernel between two questions, and costs nothing then. It cannot answer while C code holds the
interpreter lock, nor in a process that is stopped: no answer is one, too.
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

from mlaunch.base.frames import RUNPY, is_bottom
from mlaunch.protocol import payload
from mlaunch.protocol.channel import Channel, assert_never
from mlaunch.protocol.messages import Ask, ControlHears, ControlSays, ForPart, Question, Told
from mlaunch.rank import in_step

# Of the thread's own faults, which kill a process that blocks them before faulthandler can tell of it.
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
_NOT_FAULTS = signal.valid_signals() - _FAULTS
_DEEPEST = 100  # frames, as faulthandler shows


def start(channel: Channel[ControlHears, ControlSays]) -> None:
    """Starts the thread, unknown to ``threading``: a program may count its threads, and wait for them at its end."""
    _thread.start_new_thread(_answer_all, (channel,))


def _answer_all(channel: Channel[ControlHears, ControlSays]) -> None:
    # Faults are left open: a thread that causes one which it blocks is killed before any handler has written a stack.
    # A signal that the main thread blocks, in order to wait for it, would else come here, and end the process.
    _signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FAULTS)
    # Quietly: whoever has closed the channel is looked after elsewhere, and a traceback here would be a mystery.
    with contextlib.suppress(EOFError, OSError):  # the agent is gone, or the function has closed our descriptor
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
    """Returns (file, line, name) of the main thread's frames above the launcher's, innermost first.

    Nothing interrupts what the thread does, as the signal would with which agents ask for stacks.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[tuple[str, str, str]] = []
    while frame is not None and not is_bottom(frame.f_code.co_filename) and len(frames) < _DEEPEST:
        if frame.f_code.co_filename != RUNPY:
            frames.append((frame.f_code.co_filename, str(frame.f_lineno), frame.f_code.co_name))
        frame = frame.f_back
    return frames


def _module_of(feature: str) -> Any:
    """Return what a feature has in a rank."""
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
