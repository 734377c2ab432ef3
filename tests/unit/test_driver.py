"""Whoever waits for a call on ranks that stay drives them; the thread that does so otherwise is at rest meanwhile."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

from mlaunch.caller.kept.driver import Driver


class Driven:
    """What has something to say as soon as somebody hears it."""

    idle = True
    idle_timeout = None

    def __init__(self) -> None:
        self.lock, self.ended = threading.RLock(), threading.Event()
        self.come = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.polled: list[list[tuple[int, int]]] = []
        self.driver: Driver[Any] | None = None

    def watch(self, _: int) -> None:
        """Is what wakes whoever drives; nobody sleeps here."""

    def step(self) -> None:
        """Takes in nothing."""

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
    os.close(driven.come)
