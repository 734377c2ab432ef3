"""The calls on one set of ranks that stay, in order, and how they and the ranks end."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable

from mlaunch.base.exceptions import RanksLost
from mlaunch.caller.ranks.call_queue import Queue
from mlaunch.caller.ranks.driver import Driver
from mlaunch.caller.ranks.kept_call import KeptCall
from mlaunch.caller.ranks.kept_handle import KeptHandle
from mlaunch.caller.ranks.session_words import CLOSED, add_loss, how_lost, staying
from mlaunch.caller.ranks.settle_call import settle_lost
from mlaunch.caller.ranks.stay_rules import StayRules


class RanksLaunch:
    """One launch of ranks that stay, from its start to its end. ``own_server``: the fork server ends with it."""

    def __init__(self, handle: KeptHandle, rules: StayRules, *, own_server: bool) -> None:
        self.handle, self.rules = handle, rules
        self.launch_id, self.pid = handle.spec.launch_id, os.getpid()
        self.lock, self.ended = threading.RLock(), threading.Event()
        self.why_lost = ""  # how it ended, unless somebody ended it
        self._was_told = False  # the caller, that they are lost
        self._losing = False  # one has ended while no call ran, and the others are about to
        self.expired = False  # they ended because nobody called, or others wanted where they were
        self._own_server, self._abandoned, self._closing = own_server, False, False
        self._idle_since = time.monotonic()
        self._queue = Queue()
        self.present: KeptCall | None = None
        self.report = handle.report()  # of the ranks themselves
        with self.lock:  # the driver's thread takes it first
            self._driver = Driver(self)

    @property
    def over(self) -> bool:
        """Whether its ranks are gone, or about to go, or another process's."""
        return self.ended.is_set() or self.handle.ending or self._losing or self.pid != os.getpid()

    def take_loss(self) -> str:
        """Returns how they were lost, once; "" if they were not, or their caller has been told."""
        why, self._was_told = "" if self._was_told else self.why_lost, True
        return why

    @property
    def idle(self) -> bool:
        """Whether no call runs or waits."""
        return self.present is None and not self._queue

    def whole(self) -> bool:
        """Tells whether its descriptors are still its own, not closed by other code; else the next step ends it."""
        return self.ended.is_set() or (self._driver.intact() and self.handle.intact())

    def submit(self, call: KeptCall) -> None:
        """Queues the call, which ``run`` or ``leave_to_thread`` is to drive. RanksLost if the ranks are gone."""
        call.session = self
        if self.over or not self._queue.add(call):
            raise RanksLost(self.why_lost or "the ranks were ended")
        self._driver.now_or_next(self._advance)

    def pass_words_on(self) -> None:
        """Sends what the present call has to tell features' parts in the agent."""
        self._driver.now_or_next(self._send_words)

    def _send_words(self) -> None:
        if self.present is not None and self.present.words:
            for feature, word in self.present.take_words():
                self.handle.tell_part(feature, word)

    def drive(self, call: KeptCall) -> None:
        """Drives a submitted call until it is over, or these ranks are gone. Can be interrupted."""
        self._driver.drive(call)

    def drive_in_callback(self, over: Callable[[], bool], due: float | None) -> None:
        """Drives until that is so, or the time has come, if a callback asks whose thread alone would do it."""
        self._driver.drive_in_callback(over, due)

    def leave_to_thread(self) -> None:
        """Leaves what was submitted to the thread."""
        self._driver.notify()

    def close(self, *, wait: bool, evicted: bool = False) -> None:
        """Ends the ranks: after what was submitted (``wait``), or at once, as Ctrl-C would. ``evicted``: for others."""
        self.expired = self.expired or evicted
        if self.pid != os.getpid():
            return
        try:
            while wait and (last := self._last()) is not None:
                self._driver.drive(last)
            self._begin_to_end()
            self._driver.drive_to_end()
            self._driver.join()
        except BaseException:  # Ctrl-C, while they take their time
            self._begin_to_end()
            self.handle.cancel(force=True)
            self._driver.drive_to_end()
            self._driver.join()
            raise

    def cancel_queued(self) -> None:
        """Cancels the calls that have not begun."""
        if self.pid == os.getpid():
            with self.lock:
                queued = self._queue.clear()
            for call in queued:  # without the lock, since it runs user code
                call.cancel()

    def see_end(self) -> None:
        """Waits until ranks that are about to go are gone; not until all are told, by code that may wait for us."""
        with self.lock:
            if not self.ended.is_set() and not self.handle.ending:
                self.handle.end_ranks()
        self._driver.notify()
        self._driver.drive_to_end()

    def _begin_to_end(self) -> None:
        with self.lock:
            self._closing = self._closing or not self.over
            queued = self._queue.clear()
            if self.present is not None:
                self.handle.cancel(force=False)
            elif not self.ended.is_set():
                self.handle.end_ranks()
        for call in queued:  # without the lock, since it runs user code
            call.cancel()
        self._driver.notify()

    def abandon(self) -> None:
        """Lets the ranks end after what was submitted; the collector may call it anywhere."""
        if self.pid == os.getpid():
            self._abandoned = True
            self._driver.notify()

    def watch(self, fd: int) -> Callable[[], bool]:
        """Lets ``fileno`` tell of another descriptor, too; returns what asks whether that is still the same."""
        return self.handle.relay.watch(fd)

    def fileno(self) -> int:
        return self.handle.fileno()

    def timeout(self) -> float | None:
        """Returns the seconds until ``step`` is due though nothing has come."""
        idle, limit = None, self.rules.idle_timeout
        if limit is not None and self.idle and not self.handle.ending:
            idle = max(0.0, self._idle_since + limit - time.monotonic())
        return min((one for one in (idle, self.handle.timeout()) if one is not None), default=None)

    def step(self) -> None:
        """Takes in what has come."""
        with self.lock:
            if not self.ended.is_set():
                try:
                    self._send_words()
                    self._take_step()
                except Exception as error:  # no descriptor is left, or a signal handler raised: what came is lost
                    self._break(error)

    def hear_values(self, call: KeptCall) -> None:
        """Takes in the values of the present call, as long as nothing else comes; it waits for them."""
        while self.handle.ahead and not call.over:
            ready = self.handle.wait_ahead()
            with self.lock:
                if not self.handle.hear_ahead(ready):
                    return
                if self.handle.over:
                    self._finish_present()
                    self._advance()
                    return  # who tells of it drives no more, and must not wait as who does

    def tell(self) -> None:
        """Tells those who wait, and lets others run what is left; without the lock, since it runs user code."""
        if self._queue.settled:
            self._driver.step_aside()
        self._queue.tell()
        if self._queue.left:
            self.rules.carry_on(self)

    def take_left(self) -> KeptCall | None:
        """Takes out the first call that these ranks leave to others; None: there is none."""
        with self.lock:
            return self._queue.take_left()

    def _take_step(self) -> None:
        if not self.whole():
            self.handle.cancel(force=True)
            self.handle.outcome.broken_by(CLOSED)
            self._end()
        elif not self.handle.step():
            self._end()
        elif self.handle.over and self.present is not None:
            self._finish_present()
        elif self.present is None:
            self._losing = self.handle.outcome.failed  # a call that begins now would not hear why
        self._advance()
        if self.idle and not self.over:
            self._end_if_unused()

    def _break(self, error: Exception) -> None:
        """Ends the ranks, of which nobody knows any more what they have answered."""
        if self.whole():  # else the next step says why
            self.handle.outcome.interrupted_by(error)
        if not self.handle.ending:
            self.handle.cancel(force=True)

    def _end_if_unused(self) -> None:
        if self._abandoned:
            self.handle.end_ranks()
        elif (limit := self.rules.idle_timeout) is not None and time.monotonic() >= self._idle_since + limit:
            self.expired = True
            self.handle.end_ranks()

    def _advance(self) -> None:
        """Begins the next call if none runs."""
        while self.present is None and not self._losing and not self.ended.is_set() and not self.handle.ending:
            self.present = call = self._queue.begin_next()
            if call is None:
                return
            try:
                self.handle.begin(call)
            except (BrokenPipeError, ConnectionResetError):  # which its end will tell
                continue
            except OSError as error:
                self._break(error)

    def _finish_present(self) -> None:
        call, self.present = self.present, None
        make, stale = self.handle.finish()
        self._idle_since = time.monotonic()
        if call is not None:
            call.stale = stale
            self._queue.settle(call, lambda: staying(make()))

    def _end(self) -> None:
        """Takes in that the launch is over, and what that means for the calls."""
        outcome, self.report = self.handle.finish_launch()
        server = self.handle.server
        fate = server.describe_end() if server.ended() else ""
        why = "they were closed" if self._closing else how_lost(outcome, fate)
        self.why_lost = "" if self.expired else why
        if self.present is not None:
            self._was_told = not self.present.unheard
            note = None if self._closing else functools.partial(add_loss, restart=self.rules.restart)
            self._queue.settle(self.present, functools.partial(settle_lost, outcome, self.report, why, note))
        else:
            outcome.close()
        self.present = None
        self._queue.lose(self.report, self.why_lost, others_follow=self.rules.restart and not self._closing)
        self.handle.close()
        if self._own_server:
            self.handle.server.close()
        self.ended.set()
        self._driver.end()
        if self.expired or (self._was_told and not self._queue.left):
            self.rules.forget(self)

    def interrupt(self, call: KeptCall, interrupt: BaseException, *, again: bool = False) -> None:
        """Ends a call because of an interrupt; the launch, if that has come before."""
        with self.lock:
            if self._queue.remove(call):
                call.cancel()
            elif call is self.present and again:
                self.handle.cancel(force=True)
            elif call is self.present:
                self.handle.end_call(interrupt)
        self._driver.notify()

    def _last(self) -> KeptCall | None:
        """Returns the call that will be over last."""
        with self.lock:
            return self._queue.last or self.present
