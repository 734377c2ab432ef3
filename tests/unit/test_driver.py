"""Whoever waits for a call on ranks that stay drives them; the thread that does so otherwise is at rest meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from mlaunch.ranks.caller.driver import Driver
from mlaunch.ranks.caller.ranks_launch import StayRules


class Driven:
    """What has something to say as soon as somebody hears it."""

    idle = True
    rules = StayRules()

    def __init__(self) -> None:
        self.lock, self.ended = threading.RLock(), threading.Event()
        self.come = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.polled: list[list[tuple[int, int]]] = []
        self.driver: Driver | None = None

    def watch(self, _: int) -> Callable[[], bool]:
        """Is what wakes whoever drives; nobody sleeps here."""
        return lambda: True

    def step(self) -> None:
        """Takes in nothing."""

    def tell(self) -> None:
        """Tells nobody."""

    def hear_values(self, call: Any) -> None:
        assert self.driver is not None
        os.eventfd_write(self.come, 1)
        self.polled.append(self.driver._watched.poll(0))  # as the thread would
        os.eventfd_read(self.come)
        call.over = True

    def fileno(self) -> int:
        return self.come

    def timeout(self) -> None:
        return None


def end(driven: Driven, driver: Driver) -> None:
    driven.ended.set()
    driver.end()
    driver.drive_to_end()
    driver.join()
    os.close(driven.come)


def test_the_thread_is_told_nothing_while_somebody_else_drives() -> None:
    driven = Driven()
    driver = driven.driver = Driver(driven)
    driver.drive(cast(Any, SimpleNamespace(over=False)))
    assert driven.polled == [[]]
    end(driven, driver)


class Submitted(Driven):
    """Has a call when the thread begins to wait, and is driven by somebody else until it is idle."""

    rules = StayRules(0.01)

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.over = threading.Event(), threading.Event()

    def timeout(self) -> None:
        """Nothing is due while a call waits."""
        self.asked.set()

    def hear_values(self, call: Any) -> None:
        call.over = True

    def step(self) -> None:
        if self.asked.is_set():
            self.over.set()


def test_the_thread_looks_whether_ranks_idle_though_it_began_to_wait_before_a_call() -> None:
    driven = Submitted()
    driver = Driver(driven)
    assert driven.asked.wait(30)
    driver.drive(cast(Any, SimpleNamespace(over=False)))
    assert driven.over.wait(30)
    end(driven, driver)


class Shared(Driven):
    """Has another's call, which waits for somebody to drive."""

    idle = False

    def __init__(self) -> None:
        super().__init__()
        self.stepped = threading.Event()

    def watch(self, fd: int) -> Callable[[], bool]:
        os.close(self.come)
        self.come = os.dup(fd)
        return lambda: True

    def hear_values(self, call: Any) -> None:
        call.over = True

    def step(self) -> None:
        self.stepped.set()


def test_the_thread_is_told_when_somebody_ceases_to_drive_and_calls_of_others_remain() -> None:
    driven = Shared()
    driver = Driver(driven)
    driver.drive(cast(Any, SimpleNamespace(over=False)))
    assert driven.stepped.wait(30)
    end(driven, driver)


class Told(Driven):
    """Is left, as by one who runs a callback, by whoever has heard something."""

    def __init__(self) -> None:
        super().__init__()
        self.stepped = threading.Event()

    def watch(self, fd: int) -> Callable[[], bool]:
        os.close(self.come)
        self.come = os.dup(fd)
        return lambda: True

    def hear_values(self, call: Any) -> None:
        assert self.driver is not None
        if isinstance(call, Left):
            self.driver.step_aside()

    def step(self) -> None:
        self.stepped.set()


class Left:
    """A call that another thread ends just after its caller has found that it is not over."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.is_over, self._end = False, end

    @property
    def over(self) -> bool:
        found = self.is_over
        if not found:
            self.is_over = True
            other = threading.Thread(target=self._end)
            other.start()
            other.join(30)
        return found


class WaitedFor:
    """A call whose caller has looked twice, and then waits."""

    def __init__(self) -> None:
        self.is_over, self.looks, self.is_awaited = False, 0, threading.Event()

    @property
    def over(self) -> bool:
        found, self.looks = self.is_over, self.looks + 1
        if self.looks == 2:
            self.is_awaited.set()
        return found


def test_a_call_that_is_told_while_nobody_drives_is_not_waited_for() -> None:
    driven = Told()
    driver = driven.driver = Driver(driven)
    driver.drive(cast(Any, Left(driver._tell)))
    assert not driven.stepped.is_set()
    end(driven, driver)


def test_a_thread_that_tells_a_call_wakes_the_one_that_drives_by_then() -> None:
    driven, awaited = Told(), WaitedFor()
    driver = driven.driver = Driver(driven)
    other = threading.Thread(target=driver.drive, args=(awaited,))
    first = Left(lambda: None)

    def tell() -> None:
        """Is of the first caller, who has stepped aside for it."""
        if threading.current_thread() is threading.main_thread() and not first.is_over:
            first.is_over = True
            other.start()
            assert awaited.is_awaited.wait(30)
            awaited.is_over = True

    driven.tell = tell  # type: ignore[method-assign]
    driver.drive(cast(Any, first))
    assert driven.stepped.wait(30)
    other.join(30)
    end(driven, driver)
