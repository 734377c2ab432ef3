"""Signal handlers at the moments that a launch chooses: never between receiving a descriptor or record and keeping it.

Python runs signal handlers between any two steps of its main thread. A KeyboardInterrupt there loses what was just
received. So a launch defers the handler, and allows it where it waits or runs user code, and nothing is in flight. The
same is true of handlers of other signals that may raise, such as the alarm of a timeout. Without this, of 400
interrupts within the first 12 ms of a call some leaked descriptors, and one lost the record that the server is ready.

The handler of a deferral stays in place from its beginning to its end, and has a switch for passing signals on. If
handlers were exchanged instead, a KeyboardInterrupt just before the exchange would leave the wrong one behind.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal wraps in enumerations, for which a call is too short
import _thread
import functools
import math
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from mlaunch.base import linux
from mlaunch.base.fds import in_forks, renewed

if TYPE_CHECKING:
    from collections.abc import Generator

    from mlaunch.core.records import Need

_Handler = Callable[[int, FrameType | None], Any]
T = TypeVar("T")
# Seconds, at most, of one wait in C. Python looks for signals between two steps, so one that comes after the last look,
# and before the wait begins, does not end it.
_LOOK = 1.0
_MARK = "_mlaunch_by_handler"
_SIGNALS = (
    signal.SIGINT,
    signal.SIGALRM,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class EndSignal(BaseException):
    """A signal to this process that is passed on to its ranks, and ends them."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class _Deferral:
    """One deferral of signals. ``handlers``: the deferred handlers, by number."""

    def __init__(self, handlers: Mapping[int, _Handler]) -> None:
        self._handlers = handlers
        self._open = False
        self._pending: dict[int, FrameType | None] = {}  # each once, however often it came, as in the kernel

    def begin(self) -> None:
        """Take over all signals, or none of them if a handler raises in between."""
        try:
            for number in self._handlers:
                _signal.signal(number, self.take)
            _deferrals.append(self)
        except BaseException:
            self._give_back(list(self._handlers.items()))
            raise

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, now or later."""
        self._pending[number] = frame
        if self._open:
            self._fire()

    def open(self) -> None:
        self._open = True
        self._fire()

    def close(self) -> None:
        self._open = False

    def end(self, *, fire: bool) -> None:
        """Put the handlers back, and call them for what has come; ``fire`` False: drop an interrupt."""
        if not fire:
            self._pending.pop(signal.SIGINT, None)
        try:
            self._give_back(list(self._handlers.items()))
        finally:
            self._fire()

    def _give_back(self, handlers: list[tuple[int, _Handler]]) -> None:
        """Put all handlers back, even if one that is back already raises."""
        if not handlers:
            return
        (number, handler), *others = handlers
        try:
            if _signal.getsignal(number) == self.take:  # else user code has set another
                _signal.signal(number, handler)
        finally:
            self._give_back(others)

    def _fire(self) -> None:
        try:
            while self._pending:
                number, frame = self._pending.popitem()
                self._handlers[number](number, frame)
        except BaseException as error:
            self._open = False  # the exception leaves the open block
            BaseException.__setattr__(error, _MARK, True)  # a class may refuse by a __setattr__ of its own
            raise


def by_handler(error: BaseException) -> bool:
    """True if a signal handler raised the error, and not the code that was running."""
    return bool(getattr(error, _MARK, False))


class _MainThread:
    """The main thread's number; ``threading.main_thread()`` would take longer."""

    def __init__(self) -> None:
        self.ident = threading.main_thread().ident
        in_forks(self._take_over)

    def _take_over(self) -> None:
        self.ident = threading.get_ident()


_main = _MainThread()
_deferrals: list[_Deferral] = []  # the innermost last: a __reduce__ may launch, too


# No context managers of contextlib's, which set attributes of the exceptions that pass through them: some refuse.


class deferred:
    """A block that defers signals with Python handlers to the next ``allowed``, or to its end.

    It does nothing outside of the main thread, the only one that runs handlers.
    """

    def __enter__(self) -> None:
        self._deferral: _Deferral | None = None
        if threading.get_ident() == _main.ident:
            found: dict[int, _Handler] = {
                number: handler for number in _SIGNALS if callable(handler := _signal.getsignal(number))
            }
            deferral = _Deferral(found)
            deferral.begin()
            self._deferral = deferral

    def __exit__(self, kind: object, *_: object) -> None:
        if self._deferral is not None:
            self._deferral.close()
            _deferrals.remove(self._deferral)
            self._deferral.end(fire=kind is None)  # not if an exception is on its way already


class allowed:
    """A block in which signals are handled as they come, and first those that were deferred."""

    def __enter__(self) -> None:
        here = bool(_deferrals) and threading.get_ident() == _main.ident
        self._deferral = _deferrals[-1] if here else None
        if self._deferral is not None:
            self._deferral.open()

    def __exit__(self, *_: object) -> None:
        if self._deferral is not None:
            self._deferral.close()


def wait(come: Callable[[float], T], timeout: float | None = None) -> T:
    """Return what has come within ``timeout`` seconds (None: no limit); signal handlers run meanwhile.

    Args:
        come: Waits for so many seconds, and returns what has come; something false if nothing has.
        timeout: The seconds.
    """
    left = math.inf if timeout is None else timeout
    with allowed():
        while left > _LOOK:
            if found := come(_LOOK):
                return found
            left -= _LOOK
        return come(left)


def wait_readable(fds: Sequence[int], timeout: float | None = None) -> list[int]:
    """Wait as ``linux.wait_readable`` does, but let signal handlers run."""
    return wait(functools.partial(linux.wait_readable, fds), timeout)


def carry_out(steps: Generator[Need, None, T]) -> T:
    """Drive steps to their end in this thread; return their value. An interrupt is raised where they wait."""
    try:
        need = next(steps)
        while True:
            try:
                if not need.row:  # only a process with many calls has one
                    wait_readable(need.fds, need.timeout)
            except BaseException as interrupt:  # Ctrl-C, or what another signal handler raised
                need = steps.throw(interrupt)
            else:
                need = next(steps)
    except StopIteration as done:
        value: T = done.value
        return value


class Condition(_thread.RLock):  # type: ignore[misc]  # stubs call it final; CPython has it be subclassed
    """A condition for futures that a signal handler which raises never leaves locked.

    With that of ``threading``, a KeyboardInterrupt may come after the lock was taken and before the ``with`` block, or
    before it is released: the next thread that wants it waits for ever. From Python 3.14 on that is true of every lock.
    So signals are deferred from before it is taken until after it is released.
    """

    def __init__(self) -> None:
        self._waiters: list[threading.Lock] = []
        self._inside: list[deferred] = []  # of the thread that holds the lock, once for each time
        renewed(self)

    def _at_fork_reinit(self) -> None:
        super()._at_fork_reinit()  # type: ignore[misc]  # as all locks have, for this
        self._waiters, self._inside = [], []

    def __enter__(self) -> bool:  # type: ignore[override]  # which may be called with what acquire takes
        signals = deferred()
        signals.__enter__()
        self.acquire()
        self._inside.append(signals)
        return True

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        signals = self._inside.pop()
        self.release()
        signals.__exit__(kind, *error)

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock until notified, for ``timeout`` seconds at most (None: no limit); False if it was not.

        Called in its ``with`` block, entered once. Can be interrupted.
        """
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        signals = self._inside.pop()
        self.release()
        try:
            return wait(lambda seconds: waiter.acquire(timeout=max(0.0, seconds)), timeout)
        finally:
            self.acquire()
            self._inside.append(signals)
            self._waiters.remove(waiter)

    def notify_all(self) -> None:
        """Wake all who wait. Called under the lock."""
        for waiter in self._waiters:
            if waiter.locked():  # else it was notified before, and has not woken yet
                waiter.release()
