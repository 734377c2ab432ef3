"""A call on ranks that stay: what is sent, and the future of its values."""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, NoReturn

from mlaunch.base.exceptions import RanksLost, is_misuse
from mlaunch.base.log import log
from mlaunch.caller import interrupts
from mlaunch.caller.launch.settle import Ended
from mlaunch.caller.launch.start import unpicklable_call
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.output_plan import OutputPlan
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.caller.report.user_frames import raises_from_caller
from mlaunch.protocol import calls, explain, payload
from mlaunch.protocol.calls import Call
from mlaunch.protocol.payload import Payload
from mlaunch.protocol.spec import LaunchSpec
from mlaunch.ranks.caller.held import Destination, pickling_towards

_OF_A_CALL = ("deadline", "log_dir", "progress")  # options
_CALL_LIMIT = 16 * 1024  # bytes of a call inside the record that begins it; a memory file costs more than a call
_SENT = Payload()  # replaces content that is no longer needed


class MergedOptions:
    """The options of ranks, merged with those of a call; checked once if a call's options are given repeatedly."""

    def __init__(self, own: Options) -> None:
        self._own = own
        self._last: tuple[Options, Options] | None = None  # those given, and the result

    def with_those_of(self, call: Options) -> Options:
        if call is self._own:  # what ranks print is handled as it was when they started
            return call
        if self._last is None or self._last[0] is not call:
            self._last = call, self._own.replaced({field: getattr(call, field) for field in _OF_A_CALL})
        return self._last[1]


class RanksFuture(Future[Any]):
    """The future of a call on ranks that stay; its result is the list of their values, in the order of ranks.

    Attributes:
        report: The LaunchReport of the call; None before it is over.
    """

    make_report: Callable[[], LaunchReport] | None = None
    stale: str = ""  # modules, with commas and times, of which the ranks run older code than their files hold

    def __init__(self) -> None:
        super().__init__()
        self._queued: Callable[[], KeptCall | None] = lambda: None
        # With the usual one, Ctrl-C in result() may leave it locked, and the thread that sets the values hangs.
        self._condition = interrupts.Condition()  # type: ignore[assignment]

    def queue(self, call: KeptCall) -> None:
        """Take the call of this future, before it is queued; again, if other ranks must run it."""
        call.future, self._queued = self, weakref.ref(call)

    def __reduce__(self) -> NoReturn:
        raise TypeError("only the process that made this future can wait for it: pass its result()")

    @raises_from_caller
    def result(self, timeout: float | None = None) -> Any:
        return super().result(self._drive_in_callback(timeout))

    @raises_from_caller
    def exception(self, timeout: float | None = None) -> BaseException | None:
        return super().exception(self._drive_in_callback(timeout))

    def _drive_in_callback(self, timeout: float | None) -> float | None:
        """Drive the call if a callback waits for it, because no other thread would; return the seconds left."""
        due = None if timeout is None else time.monotonic() + timeout
        call = self._queued()
        if call is not None and not call.over:
            call.launch.drive_in_callback(self.done, due)
        return None if due is None else max(0.0, due - time.monotonic())

    @property
    def report(self) -> LaunchReport | None:
        return None if self.make_report is None else self.make_report()


def _held_lock() -> threading.Lock:
    lock = threading.Lock()
    # A lock that is taken in C, and not a condition: with a condition, Ctrl-C can leave its lock taken.
    lock.acquire()
    return lock


@dataclass(eq=False)
class KeptCall:
    """A call, from its making to its end, on whatever ranks run it.

    ``spec``: with this call's name and deadline. ``moves``: it holds nothing of these ranks, so others may run it.
    ``freed``: numbers of held objects that it frees; if it does not begin, ``free_later`` takes them back. ``over``: it
    is settled or cancelled, and its future is set. ``stale`` is as the future's.
    """

    spec: LaunchSpec
    content: Payload
    plan: OutputPlan
    options: Options
    moves: bool
    freed: Sequence[int]
    free_later: Callable[[str, int], None]
    future: RanksFuture | None = None  # a caller has it, or will
    number: int = 0  # among the calls on these ranks, in the order of the queue
    launch: Any = field(init=False)  # the RanksLaunch that queues it, whose module imports this one
    ended: Ended | None = None
    _make: Callable[[], Ended] = field(init=False)  # returns how it ended
    stale: str = ""
    over: bool = False
    words: list[tuple[str, object]] = field(default_factory=list)  # for features' parts in the agent, once it runs
    unheard: bool = False  # the user does not wait for it, and is not warned if ranks are lost in it
    _running: threading.Lock = field(default_factory=_held_lock)

    @property
    def name(self) -> str:
        return self.spec.call.name

    def attach(self, future: RanksFuture | None) -> None:
        """Take the future of this call; again, if other ranks must run it."""
        if future is not None:
            future.queue(self)

    def tell_part(self, feature: str, word: object) -> None:
        """Send a feature's part in the agent a word about this call, once it runs. For any thread."""
        self.words.append((feature, word))
        if hasattr(self, "launch"):  # it is queued
            self.launch.pass_words_on()

    def take_words(self) -> list[tuple[str, object]]:
        """Return the words that must be sent, once."""
        words = []
        while self.words:  # another thread may add one
            words.append(self.words.pop(0))
        return words

    def begin(self) -> bool:
        """Begin the call; return False if its future was cancelled."""
        return self.future is None or self.future.set_running_or_notify_cancel()

    def settle(self, make: Callable[[], Ended]) -> None:
        """Keep the function that returns how it ended; ``tell`` calls it, and sets the future."""
        self._make = make
        self.close()

    def tell(self) -> None:
        """Set the future of a settled call. Unpickling its values and calling callbacks may run user code."""
        ended = self.ended = self._make()
        if ended.error is not None:
            self._keep_freed()
        if self.future is not None:
            self.future.make_report, self.future.stale = ended.report, self.stale
            try:
                _resolve(self.future, ended)
            except BaseException:  # sys.exit in a callback: the driving thread must continue
                log.exception("a callback of the future of %s raised", self.spec.call.name)
        self._end()

    def cancel(self) -> None:
        """Cancel a call that has not begun; its future's callbacks may run user code."""
        if self.future is not None:
            self.future.cancel()
        self.drop()
        self._end()

    def drop(self) -> None:
        """Forget a call that will not begin."""
        self._keep_freed()
        self.close()

    def _keep_freed(self) -> None:
        """Leave to a later call what this one should free: nothing is freed twice, even if a call failed meanwhile."""
        freed, self.freed = self.freed, ()
        for number in freed:
            self.free_later(self.spec.launch_id, number)

    def refuse(self, report: Callable[[], LaunchReport], why: str, cause: BaseException) -> None:
        """Settle a call that lost ranks have left and no others take, and set its future."""
        if self.begin():
            error = lost(self.name, why)
            error.__cause__ = cause
            self.settle(lambda: Ended(report, [], error))
            self.tell()
        else:
            self.cancel()

    def drive(self) -> Ended:
        """Drive a submitted call to its end, on whatever ranks. An interrupt ends it, and is then how it ended."""
        interrupt: BaseException | None = None
        interrupted: Any = None
        while not self.over:
            try:
                self.launch.drive(self)
            except BaseException as error:  # Ctrl-C, or what another signal handler raised
                interrupt, interrupted = interrupt or error, self._interrupt(error, interrupted)
        if self.ended is None or (interrupt is not None and self.ended.error is None):
            raise interrupt or CancelledError
        return self.ended

    def _interrupt(self, error: BaseException, interrupted: Any) -> Any:
        """End the call on the ranks that have it now; return those.

        ``interrupted``: the ranks that were asked before.
        """
        asked: Any = None
        while asked is not self.launch:  # meanwhile it may move to new ranks, which have done nothing yet
            asked = self.launch
            asked.interrupt(self, error, again=asked is interrupted)
        return asked

    def wait(self, timeout: float) -> bool:
        """Wait until another thread has driven the call to its end; False if it has not within so many seconds."""
        if ended := self._running.acquire(timeout=timeout):
            self._running.release()
        return ended

    def close(self) -> None:
        """Release the content that was sent."""
        content, self.content = self.content, _SENT
        if content.memfd >= 0:
            content.close()

    def _end(self) -> None:
        self.over = True
        self._running.release()


def _resolve(future: RanksFuture, ended: Ended) -> None:
    if ended.error is not None:
        future.set_exception(ended.error)
    else:
        future.set_result(ended.values)


def lost(name: str, why: str) -> RanksLost:
    """Return the error of a call whose ranks are gone."""
    return RanksLost(f"{name} was not run, since its ranks are gone: {why}")


def pickle_call(owner: str, name: str, where: str, size: int, call: Call) -> tuple[Payload, bool]:
    """Pickle a call on ``size`` ranks of the launch ``owner``. TypeError that names what cannot be pickled.

    Returns:
        The content, and whether other ranks could run it: it holds nothing of these.
    """
    plain = calls.to_plain(call)
    if type(plain[0]) is tuple and payload.PLAIN.issuperset(map(type, (*call.args, *call.kwargs.values()))):
        data = pickle.dumps(plain, 5)
        if len(data) <= _CALL_LIMIT:
            return Payload(data), True
    to = Destination(owner, where, size)
    with pickling_towards(to), interrupts.allowed():  # it runs user code, and may take long
        try:
            return payload.pack(plain, "call", most=_CALL_LIMIT), not to.used
        except OSError:
            raise
        except Exception as error:  # whatever a __reduce__ may raise
            if is_misuse(error) or interrupts.by_handler(error):  # a handle in the wrong place, an alarm
                raise
            raise unpicklable_call(call, name, error) from explain.below_the_pickler(error)
