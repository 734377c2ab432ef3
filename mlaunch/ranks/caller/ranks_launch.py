"""The calls on one launch of ranks that stay, in order, and how they and the ranks end."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlaunch.base.exceptions import RanksLost, report_of
from mlaunch.caller.launch.outcome import Outcome
from mlaunch.caller.launch.settle import Ended, add_note, reason_of, settle
from mlaunch.caller.report.failure_text import in_order
from mlaunch.caller.report.launch_report import LaunchReport
from mlaunch.ranks.caller.driver import Driver
from mlaunch.ranks.caller.kept_call import KeptCall, lost
from mlaunch.ranks.caller.kept_handle import KeptHandle

_STAYED = "the ranks are in step and stay, with what they hold"
_GONE = "the ranks were ended ({why}); what they held is lost, and {next}{doing}"
_NEXT = {True: "the next call starts fresh ones", False: "no call starts others (restart=False)"}
_CLOSED = "other code in this process closed the descriptors by which their caller speaks to them"
_OUT_OF_STEP = "not all of them came back in step"


@dataclass
class StayRules:
    """The rules for how long ranks stay without calls, and what follows once they are lost.

    ``Ranks`` changes them at any time; each of its launches reads them.

    Attributes:
        idle_timeout: Seconds from the end of a call. None: no limit.
        restart: Other ranks follow lost ones.
        yields: Others may end the ranks while they are idle, to get their devices.
        carry_on: Starts those other ranks, given the launch that was lost; they take the calls that it left.
        forget: Called, in any thread and under a launch's lock, when one has ended and nobody has to learn of that.
    """

    idle_timeout: float | None = None
    restart: bool = True
    yields: bool = False
    carry_on: Callable[[RanksLaunch], None] = lambda _: None
    forget: Callable[[RanksLaunch], None] = lambda _: None


class RanksLaunch:
    """One launch of ranks that stay, from its start to its end.

    The queue, and what is left or settled, change under ``lock``; ``submit`` and ``interrupt`` take ``_entry``, too.

    Args:
        handle: The launch.
        rules: Read again whenever they count.
        own_server: Its fork server ends with it.
    """

    def __init__(self, handle: KeptHandle, rules: StayRules, *, own_server: bool) -> None:
        self.handle, self.rules = handle, rules
        self.launch_id, self.pid = handle.spec.launch_id, os.getpid()
        self.lock, self.ended = threading.RLock(), threading.Event()
        self.why_lost = ""  # how it ended, unless a caller ended it
        self.expired = False  # it ended because it had no calls, or others wanted its devices
        self.present: KeptCall | None = None
        self._was_told = False  # the caller was told that the ranks are lost
        self._losing = False  # one has ended while no call ran, and the others are about to
        self._own_server, self._abandoned, self._closing = own_server, False, False
        self._idle_since = time.monotonic()
        # Not the lock: a step may hold that for as long as nobody reads what ranks print.
        self._entry = threading.Lock()  # never held by a thread that waits
        self._numbers = itertools.count(1)
        self._is_shut = False  # to calls: the ranks are lost
        self._waiting: deque[KeptCall] = deque()
        self._left: deque[KeptCall] = deque()  # calls that other ranks may run
        self._settled: deque[KeptCall] = deque()  # calls whose futures are not set yet
        self.report = handle.report()  # of the ranks themselves
        with self.lock:  # the driver's thread takes it first
            self._driver = Driver(self)

    @property
    def over(self) -> bool:
        """True if its ranks are gone, or about to go, or belong to another process."""
        return self.ended.is_set() or self.handle.ending or self._losing or self.pid != os.getpid()

    @property
    def idle(self) -> bool:
        """True if no call runs or waits."""
        return self.present is None and not self._waiting

    def take_loss(self) -> str:
        """Return how the ranks were lost, once; "" if they were not, or their caller has been told."""
        why, self._was_told = "" if self._was_told else self.why_lost, True
        return why

    def whole(self) -> bool:
        """True if its descriptors are still its own, not closed by other code; otherwise the next step ends it."""
        return self.ended.is_set() or (self._driver.intact() and self.handle.intact())

    # Calls

    def submit(self, call: KeptCall) -> None:
        """Queue the call; ``drive`` or ``leave_to_thread`` must follow. RanksLost if the ranks are gone."""
        call.launch, call.number = self, 0  # lost ranks may have given it a number
        with self._entry:
            if not self.over and not self._is_shut:
                call.number = next(self._numbers)
                self._waiting.append(call)
        if not call.number:
            raise RanksLost(self.why_lost or "the ranks were ended")
        self._driver.now_or_next(self._advance)

    def drive(self, call: KeptCall) -> None:
        """Drive a submitted call until it is over, or these ranks are gone. Can be interrupted."""
        self._driver.drive(call)

    def drive_in_callback(self, over: Callable[[], bool], due: float | None) -> None:
        """Drive until ``over`` or ``due``, if a callback asks in the driver's own thread: no other would drive."""
        self._driver.drive_in_callback(over, due)

    def leave_to_thread(self) -> None:
        """Leave submitted calls to the driver's thread."""
        self._driver.notify()

    def pass_words_on(self) -> None:
        """Send the words of the present call to features' parts in the agent."""
        self._driver.now_or_next(self._send_words)

    def _send_words(self) -> None:
        if self.present is not None and self.present.words:
            for feature, word in self.present.take_words():
                self.handle.tell_part(feature, word)

    def interrupt(self, call: KeptCall, interrupt: BaseException, *, again: bool = False) -> None:
        """End a call because of an interrupt; end the launch if an interrupt has come before."""
        with self.lock:
            if self._take_out(call):
                call.cancel()
            elif call is self.present and again:
                self.handle.cancel(force=True)
            elif call is self.present:
                self.handle.end_call(interrupt)
        self._driver.notify()

    def _take_out(self, call: KeptCall) -> bool:
        """Take a call out of the queue; return False if it has begun."""
        with self._entry:
            for calls in (self._waiting, self._left):
                if call in calls:
                    calls.remove(call)
                    return True
            return False

    def cancel_queued(self) -> None:
        """Cancel the calls that have not begun."""
        if self.pid == os.getpid():
            with self.lock:
                queued = self._empty()
            for call in queued:  # without the lock, since it runs user code
                call.cancel()

    def _empty(self) -> deque[KeptCall]:
        """Take all calls out of the queue."""
        with self._entry:
            waiting, self._waiting = self._waiting, deque()
            return waiting

    def take_left(self) -> KeptCall | None:
        """Take out the first call that these ranks leave to others; None if there is none."""
        with self.lock:
            return self._left.popleft() if self._left else None

    # For the driver

    def watch(self, fd: int) -> Callable[[], bool]:
        """Poll ``fd``, too; return a check that is True while it is still the same file."""
        return self.handle.relay.watch(fd)

    def fileno(self) -> int:
        """Return a descriptor that can be read when ``step`` has something to do."""
        return self.handle.fileno()

    def timeout(self) -> float | None:
        """Return the seconds until ``step`` is due even if nothing has come."""
        idle, limit = None, self.rules.idle_timeout
        if limit is not None and self.idle and not self.handle.ending:
            idle = max(0.0, self._idle_since + limit - time.monotonic())
        return min((one for one in (idle, self.handle.timeout()) if one is not None), default=None)

    def hear_values(self, call: KeptCall) -> None:
        """Take in the values of the present call while its caller waits for them, as long as nothing else comes."""
        while self.handle.ahead and not call.over:
            ready = self.handle.wait_ahead()
            with self.lock:
                if not self.handle.hear_ahead(ready):
                    return
                if self.handle.over:
                    self._finish_present()
                    self._advance()
                    return  # the thread that sets futures drives no more, and must not wait as if it did

    def step(self) -> None:
        """Take in what has come."""
        with self.lock:
            if not self.ended.is_set():
                try:
                    self._send_words()
                    self._take_step()
                except Exception as error:  # no descriptor is left, or a signal handler raised: what came is lost
                    self._break(error)

    def tell(self) -> None:
        """Set the futures of settled calls, and give left calls to others. Without the lock: it runs user code."""
        if self._settled:
            self._driver.step_aside()
        while self._settled:
            try:
                call = self._settled.popleft()
            except IndexError:  # another thread sets futures, too
                break
            call.tell()
        if self._left:
            self.rules.carry_on(self)

    def _take_step(self) -> None:
        if not self.whole():
            self.handle.cancel(force=True)
            self.handle.outcome.broken_by(_CLOSED)
            self._end()
        elif not self.handle.step():
            self._end()
        elif self.handle.over and self.present is not None:
            self._finish_present()
        elif self.present is None:
            self._losing = self.handle.outcome.failed  # a call that begins now would not learn why
        self._advance()
        if self.idle and not self.over:
            self._end_if_unused()

    def _advance(self) -> None:
        """Begin the next call if none runs."""
        while self.present is None and not self._losing and not self.ended.is_set() and not self.handle.ending:
            if not self._waiting:
                return
            call = self._waiting.popleft()
            if not call.begin():
                call.cancel()
                continue
            self.present = call
            try:
                self.handle.begin(call)
            except (BrokenPipeError, ConnectionResetError):  # the launch's end explains it
                continue
            except OSError as error:
                self._break(error)

    def _finish_present(self) -> None:
        call, self.present = self.present, None
        make, stale = self.handle.finish()
        self._idle_since = time.monotonic()
        if call is not None:
            call.stale = stale
            self._settle(call, functools.partial(_staying, make))

    def _settle(self, call: KeptCall, make: Callable[[], Ended]) -> None:
        """Note how a call ended; ``tell`` sets its future later."""
        call.settle(make)
        self._settled.append(call)

    def _break(self, error: Exception) -> None:
        """End the ranks, because it is unknown now what they have answered."""
        if self.whole():  # otherwise the next step says why
            self.handle.outcome.interrupted_by(error)
        if not self.handle.ending:
            self.handle.cancel(force=True)

    # The end

    def close(self, *, wait: bool, evicted: bool = False) -> None:
        """End the ranks: after the submitted calls (``wait``), or at once, as Ctrl-C would. ``evicted``: for others."""
        self.expired = self.expired or evicted
        if self.pid != os.getpid():
            return
        try:
            while wait and (last := self._last()) is not None:
                self._driver.drive(last)
            self._begin_to_end()
            self._driver.drive_to_end()
            self._driver.join()
        except BaseException:  # Ctrl-C, while the ranks take their time
            self._begin_to_end()
            self.handle.cancel(force=True)
            self._driver.drive_to_end()
            self._driver.join()
            raise

    def _last(self) -> KeptCall | None:
        """Return the call that will be over last."""
        with self.lock:
            return self._waiting[-1] if self._waiting else self.present

    def abandon(self) -> None:
        """Make the ranks end after the submitted calls; the collector may call it anywhere."""
        if self.pid == os.getpid():
            self._abandoned = True
            self._driver.notify()

    def see_end(self) -> None:
        """Wait until ranks that are about to go are gone, but not for callbacks, which may wait for this thread."""
        with self.lock:
            if not self.ended.is_set() and not self.handle.ending:
                self.handle.end_ranks()
        self._driver.notify()
        self._driver.drive_to_end()

    def _begin_to_end(self) -> None:
        with self.lock:
            self._closing = self._closing or not self.over
            queued = self._empty()
            if self.present is not None:
                self.handle.cancel(force=False)
            elif not self.ended.is_set():
                self.handle.end_ranks()
        for call in queued:  # without the lock, since it runs user code
            call.cancel()
        self._driver.notify()

    def _end_if_unused(self) -> None:
        if self._abandoned:
            self.handle.end_ranks()
        elif (limit := self.rules.idle_timeout) is not None and time.monotonic() >= self._idle_since + limit:
            self.expired = True
            self.handle.end_ranks()

    def _end(self) -> None:
        """Take in that the launch is over, and settle or hand over its calls."""
        outcome, self.report = self.handle.finish_launch()
        server = self.handle.server
        fate = server.describe_end() if server.ended() else ""
        why = "they were closed" if self._closing else _how_lost(outcome, fate)
        self.why_lost = "" if self.expired else why
        if self.present is not None:
            self._was_told = not self.present.unheard
            note = None if self._closing else functools.partial(_add_loss, restart=self.rules.restart)
            self._settle(self.present, functools.partial(_settle_lost, outcome, self.report, why, note))
        else:
            outcome.close()
        self.present = None
        self._lose_queued()
        self.handle.close()
        if self._own_server:
            self.handle.server.close()
        self.ended.set()
        self._driver.end()
        if self.expired or (self._was_told and not self._left):
            self.rules.forget(self)

    def _lose_queued(self) -> None:
        """Leave to others the calls that these ranks will not run, and settle calls that only these could run."""
        with self._entry:
            self._is_shut = True
        others_follow = self.rules.restart and not self._closing
        for call in self._empty():
            # A call that holds a handle of these ranks would find nothing on others.
            if others_follow and call.moves:
                self._left.append(call)
            elif call.begin():
                self._settle(call, functools.partial(Ended, self.report, [], lost(call.name, self.why_lost)))
            else:
                call.cancel()


# Errors for callers


def _staying(make: Callable[[], Ended]) -> Ended:
    """Return how a call has ended; if it has an error, note on it that the ranks stay."""
    ended = make()
    if ended.error is not None:
        add_note(ended.error, _STAYED)
    return ended


def _settle_lost(
    outcome: Outcome, report: Callable[[], LaunchReport], why: str, note: Callable[..., None] | None
) -> Ended:
    """Settle the call during which the ranks were lost. ``note`` adds to its error what that means."""
    try:
        ended = settle(outcome, report, lost=True)
    finally:
        outcome.close()
    if ended.error is None:
        return Ended(report, [], RanksLost(f"{outcome.spec.call.name} was ended: {why}"))
    if note is not None:
        told = str(report_of(ended.error) or "")
        note(ended.error, why, doing=[line for line in outcome.doing() if line not in told])
    return ended


def _add_loss(error: BaseException, why: str, *, restart: bool, doing: Sequence[str]) -> None:
    """Note on the error of a call that the ranks are lost. ``doing``: where those were that did not come back."""
    places = "".join(f"\n  {line}" for line in doing)
    add_note(error, _GONE.format(why=why, next=_NEXT[restart], doing=places))


def _how_lost(outcome: Outcome, server: str) -> str:
    """Return how a launch has ended that no caller ended; read no value.

    ``server``: how its fork server ended, if so.
    """
    interrupt = outcome.interrupt
    if interrupt is not None:
        raised = "" if isinstance(interrupt, KeyboardInterrupt) else str(interrupt).partition("\n")[0]
        return server or raised or _OUT_OF_STEP
    if outcome.refused is not None or not outcome.failures:
        why = _CLOSED if outcome.broken == _CLOSED else server or reason_of(outcome)
        return why.partition("\n")[0] or _OUT_OF_STEP
    cause = in_order(outcome.failures)[0]
    if server and cause.exitcode == 0:  # the ranks were released because the server was gone
        return server
    ended = cause.exitcode is not None or cause.rank is None  # a rank, or a machine or its server
    return f"{cause.who} {cause.what}".partition("\n")[0] if ended else _OUT_OF_STEP
