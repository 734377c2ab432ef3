"""Whoever waits for a call on ranks that stay drives them; the thread that does so otherwise is at rest meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mlaunch.caller.ranks.driver import Driver


class Driven:
    """What has something to say as soon as somebody hears it."""

    idle = True
    idle_timeout: float | None = None

    def __init__(self) -> None:
        self.lock, self.ended = threading.RLock(), threading.Event()
        self.come = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.polled: list[list[tuple[int, int]]] = []
        self.driver: Driver[Any] | None = None

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


def test_the_thread_is_told_nothing_while_somebody_else_drives() -> None:
    driven = Driven()
    driver = driven.driver = Driver[Any](driven)
    driver.drive(SimpleNamespace(over=False))
    assert driven.polled == [[]]
    driven.ended.set()
    driver.end()
    driver.drive_to_end()
    driver.join()
    os.close(driven.come)


class Submitted(Driven):
    """Has a call when the thread begins to wait, and is driven by somebody else until it is idle."""

    idle_timeout = 0.01

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
    driver = Driver[Any](driven)
    assert driven.asked.wait(30)
    driver.drive(SimpleNamespace(over=False))
    assert driven.over.wait(30)
    driven.ended.set()
    driver.end()
    driver.drive_to_end()
    driver.join()
    os.close(driven.come)


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
    driver = Driver[Any](driven)
    driver.drive(SimpleNamespace(over=False))
    assert driven.stepped.wait(30)
    driven.ended.set()
    driver.end()
    driver.drive_to_end()
    driver.join()
    os.close(driven.come)
