"""Ask the user for a line, in the main thread, while another thread drives the launch.

Only the main thread may ask: to any other, a notebook's kernel would give the text of the next cell. The other thread's
work may make the question void. An interrupt of the main thread, other than the user's, withdraws it then.
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
from mlaunch.base.exceptions import misuse
from mlaunch.base.fds import close_all
from mlaunch.caller import interrupts
from mlaunch.caller.report import notebook

_AGAIN = 0.1  # seconds between two interrupts
_END = 0  # no signal has this number


class WithdrawnError(Exception):
    """The question is withdrawn: nobody waits for its answer any more."""


def check_place() -> None:
    """Raise ValueError if nobody can be asked, before anything starts."""
    why = ""
    if threading.current_thread() is not threading.main_thread():
        why = "this is not the main thread, and only that may ask for input"
    elif (kernel := _kernel()) is not None:
        if not getattr(kernel, "_allow_stdin", True):
            why = "this notebook is run without input (by nbconvert, papermill, a server's API)"
    elif not (_is_terminal(sys.stdin) and _is_terminal(sys.stdout)):
        why = "standard input or output is not a terminal: it is redirected, or this is a job without one"
    if why:
        raise misuse(ValueError(f"debug=True: there is nobody to ask: {why}. Call it in a terminal or in a "
                                f"notebook's cell, or leave debug= out"))  # fmt: skip


def _kernel() -> Any:
    """Return the notebook's kernel, if this process is one."""
    return getattr(notebook.shell(), "kernel", None)


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except Exception:  # None, closed, a user's object
        return False


def ask(prompt: str, drive: Callable[[int], bool]) -> str | None:
    """Return the line that the user types, without its end; None if there are no more.

    Args:
        prompt: The prompt before it.
        drive: Drives the launch, in a thread. It returns True when its argument, a descriptor, can be read; and False
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
    """A question that is open, and the thread that drives the launch meanwhile."""

    def __init__(self, drive: Callable[[int], bool]) -> None:
        self._drive = drive
        self._lock = threading.Lock()
        self._asks = False  # the main thread waits for the answer, and may be interrupted
        self._open = False  # the thread may interrupt it
        self._over = os.eventfd(0, os.EFD_CLOEXEC)
        self._heard = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # gets the numbers of signals
        # A thread waits at this end. The other end must not block: Python's signal handler writes there.
        os.set_blocking(self._heard[0], True)
        self._noticed = False  # Python has run the handler of an interrupt
        tasks = (self._run, self._repeat)
        self._threads = [threading.Thread(target=task, name="mlaunch-debugger", daemon=True) for task in tasks]
        self._handler: Any = None  # the earlier one, of interrupts
        self._woken = False  # signals write to the pipe
        self.void = False
        self.error: BaseException | None = None  # of the thread

    def begin(self) -> None:
        """Start to drive."""
        self._handler = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, self._interrupted)
        if (before := signal.set_wakeup_fd(self._heard[1], warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(before)  # an event loop's, which must not miss a signal
        self._woken = before == -1
        self._asks = self._open = True
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """End the thread. It sends no interrupt afterwards."""
        # First: an interrupt of the thread's that is on its way must not raise any more.
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
        close_all([*self._heard, self._over])  # a signal of the thread's has arrived by now
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)

    def _run(self) -> None:
        try:
            is_open = self._drive(self._over)
        except BaseException as error:
            self.error, is_open = error, False
        if not is_open:
            self.void = True
            self._interrupt()

    def _repeat(self) -> None:
        """Repeat interrupts that came just before the main thread began to wait in C: it does not notice those."""
        while (number := os.read(self._heard[0], 1)[0]) != _END:
            if number == signal.SIGINT and not linux.wait_readable([self._over], _AGAIN) and not self._noticed:
                self._interrupt()

    def _interrupt(self) -> None:
        with self._lock:
            if self._open:
                # Not to the process: the kernel may choose any thread for it, and input() would continue to wait.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._noticed = True
        if not self.void:
            self._handler(number, frame)
        elif self._asks:
            raise KeyboardInterrupt


def _prepare_lines() -> None:
    """Give ``input`` line editing and a history, if it reads a terminal."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input uses it once it is imported
