"""Asks the user for a line, in the main thread, while another thread does what must go on.

The main thread alone may ask: a notebook's kernel gives the answer of its next cell to any other that waits. What
comes of the other thread's work may make the question void. It is withdrawn then, by an interrupt of the main thread
that is told apart from the user's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from mlaunch.base import linux
from mlaunch.base.fds import close_all
from mlaunch.base.misuse import misuse
from mlaunch.caller import interrupts
from mlaunch.caller.report import notebook

_AGAIN = 0.1  # seconds between two interrupts
_END = 0  # no signal has this number


class WithdrawnError(Exception):
    """The question is void: nobody waits for its answer any more."""


def check_place() -> None:
    """Raise ValueError where nobody can be asked, before anything starts."""
    why = ""
    if threading.current_thread() is not threading.main_thread():
        why = "this is not the main thread, which alone may ask for input"
    elif (kernel := _kernel()) is not None:
        if not getattr(kernel, "_allow_stdin", True):
            why = "whoever runs this notebook gives no input to it (nbconvert, papermill, a server's API)"
    elif not (_is_terminal(sys.stdin) and _is_terminal(sys.stdout)):
        why = "standard input or output is no terminal: it is redirected, or this is a job without one"
    if why:
        raise misuse(ValueError(f"debug=True: there is nobody to ask: {why}. Call it in a terminal or in a "
                                f"notebook's cell, or leave debug= out"))  # fmt: skip


def _kernel() -> Any:
    """Returns the notebook's kernel, if this process is one."""
    return getattr(notebook.shell(), "kernel", None)


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except Exception:  # None, closed, a user's object
        return False


def ask(prompt: str, drive: Callable[[int], bool]) -> str | None:
    """Returns the line that the user types, without its end; None if there are no more.

    Args:
        prompt: What stands before it.
        drive: Does what must go on, in a thread. It returns when its argument, a descriptor, can be read; and False
            as soon as the question is void.

    Raises:
        WithdrawnError: The question is void.
        KeyboardInterrupt: The user has interrupted it; or what another signal handler or ``drive`` raises.
    """
    _prepare_lines()
    question, line = _OpenQuestion(drive), None
    try:
        with interrupts.allowed():
            question.begin()
            line = input(prompt)
    except KeyboardInterrupt:
        if not question.void:
            print(flush=True)  # below the prompt
            raise
    except EOFError:
        print(flush=True)
    finally:
        question.end()
    if question.error is not None:
        raise question.error
    if question.void:
        print(flush=True)  # below the prompt
        raise WithdrawnError
    return line


class _OpenQuestion:
    """A question that is open, with the thread that drives meanwhile."""

    def __init__(self, drive: Callable[[int], bool]) -> None:
        self._drive = drive
        self._lock = threading.Lock()
        self._asks = False  # the main thread waits for the answer, and may be interrupted
        self._open = False  # the thread may interrupt it
        self._over = os.eventfd(0, os.EFD_CLOEXEC)
        self._heard = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # the numbers of signals that have come
        # The end at which our thread waits. The other one must not block: Python's signal handler writes there.
        os.set_blocking(self._heard[0], True)
        self._noticed = False  # by Python, that an interrupt has come
        tasks = (self._run, self._repeat)
        self._threads = [threading.Thread(target=task, name="mlaunch-debugger", daemon=True) for task in tasks]
        self._handler: Any = None  # of interrupts, before
        self._woken = False  # signals write to that pipe
        self.void = False
        self.error: BaseException | None = None  # of the thread

    def begin(self) -> None:
        """Begins to drive."""
        self._handler = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, self._interrupted)
        if (before := signal.set_wakeup_fd(self._heard[1], warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(before)  # an event loop's, which must not miss one
        self._woken = before == -1
        self._asks = self._open = True
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Ends the thread. No interrupt of its comes afterwards."""
        # First: an interrupt of ours that is on its way already must raise nothing any more.
        self._asks = False
        with self._lock:
            self._open = False
        if self._woken:
            signal.set_wakeup_fd(-1)
        os.eventfd_write(self._over, 1)
        os.write(self._heard[1], bytes([_END]))
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        close_all([*self._heard, self._over])  # by this time a signal of the thread's has arrived
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)

    def _run(self) -> None:
        try:
            goes_on = self._drive(self._over)
        except BaseException as error:
            self.error, goes_on = error, False
        if not goes_on:
            self.void = True
            self._interrupt()

    def _repeat(self) -> None:
        """Repeats interrupts that came just before the main thread began to wait in C: it takes no notice of those."""
        while (number := os.read(self._heard[0], 1)[0]) != _END:
            if number == signal.SIGINT and not linux.wait_readable([self._over], _AGAIN) and not self._noticed:
                self._interrupt()

    def _interrupt(self) -> None:
        with self._lock:
            if self._open:
                # To this thread, not to the process: the kernel may choose any thread then, and input() would go on
                # waiting.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._noticed = True
        if not self.void:
            self._handler(number, frame)
        elif self._asks:
            raise KeyboardInterrupt


def _prepare_lines() -> None:
    """Lets ``input`` edit lines and remember them, where it reads a terminal."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input uses it once it is imported
