"""Waits for devices, in order of arrival, and takes all that a launch wants or none.

    ticket --all tickets before it that want some of the same are gone--> first --enough are free--> lease

A waiter watches one ticket, the last before its own that wants some of the same devices; only the first watches
devices. So an end wakes one process and not all. Strictly in order: a launch that wants many keeps later ones from
overtaking it, unless somebody has stopped its process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlaunch.base import linux
from mlaunch.base.fds import close_all, in_forks
from mlaunch.base.frozen_record import frozen_record
from mlaunch.base.misuse import misuse
from mlaunch.leases.caller.lease_directory import LeaseDirectory, opened

DEVICE, TICKET = "device.", "ticket."
_STOPPED_EVERY = 1.0  # seconds between looks whether who is before us has stopped
_open: set[int] = set()  # what a fork of this process must not hold: it would keep devices from others


@frozen_record
class Wish:
    """``count`` of the devices with these names, the first that are free. ``who``: for people, "train()".

    ``holds``: devices that the launch has, whose rank asks.
    """

    names: Sequence[str]
    count: int
    who: str = ""
    holds: Sequence[str] = ()


@dataclass
class DeviceLease:
    """Devices that are this launch's while one process holds the descriptors.

    ``before``: by device, who had it last, as that one has said; without those that nobody has had.
    """

    names: tuple[str, ...]
    fds: list[int] = field(default_factory=list)
    before: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def close(self) -> None:
        """Lets go of it in this process; others may hold it."""
        fds, self.fds = self.fds, []
        _open.difference_update(fds)
        close_all(fds)


class Acquisition:
    """A place in the queue. Wait until one of ``fds()`` is ready, then ``step()``, until that returns the lease."""

    def __init__(self, directory: Path, wish: Wish) -> None:
        """Takes a ticket. OSError where there can be no leases."""
        self._wish = wish
        self._site = LeaseDirectory(directory)
        self._said = {"pid": os.getpid(), "who": wish.who, "since": time.time()}
        self._watched: dict[int, str] = {}
        self._behind: int | None = None  # the process of the ticket that is watched
        self._passed: list[str] = []  # who has stopped, and would be before us
        self._ticket = -1
        _open.update(self._site.fds())
        try:
            with self._site:
                last = max((int(name.removeprefix(TICKET)) for name in self._tickets()), default=0)
                # By the clock, so that numbers go on where all tickets were removed; the clock may have been set
                # back.
                self.number = max(last + 1, time.time_ns())
                self._said = {**self._said, "names": list(wish.names), "count": wish.count, "holds": list(wish.holds)}
                self._ticket = self._site.take(self._name, self._said)
                _open.add(self._ticket)
        except BaseException:
            self.close()
            raise

    @property
    def _name(self) -> str:
        return f"{TICKET}{self.number:020}"

    def fds(self) -> list[int]:
        """Returns what hangs up when ``step`` has something to do."""
        return list(self._watched)

    def waits_for(self) -> str:
        """Says for whom: "search() (pid 7)", and others."""
        with self._site:
            holders = [self._site.said(name) for name in self._watched.values()]
        found = [f"{said.get('who') or '?'} (pid {said.get('pid')})" for said in holders]
        return ", ".join(
            dict.fromkeys([*found, *(f"{one}, which has stopped and is passed over" for one in self._passed)])
        )

    def timeout(self) -> float | None:
        """Return the seconds until ``step`` is due though nothing is ready; None: it is not."""
        # Nobody is told of a process that somebody stops, and of one that goes on.
        return _STOPPED_EVERY if self._behind is not None or self._passed else None

    def prefer(self, names: Sequence[str]) -> None:
        """Takes the same devices in this order from now on."""
        self._wish = dataclasses.replace(self._wish, names=names)

    def step(self) -> DeviceLease | None:
        """Looks again; None: it is not our turn, or too few are free.

        Raises:
            RuntimeError: We would wait for ever: those for whom we wait, wait for devices of the launch that we are in.
            OSError: The directory was removed, or there is something else in it where a device has its place.
        """
        self._unwatch()
        with self._site:
            before = self._before()
            if before is not None:
                self._watch(*before)
                self._behind = self._site.said(before[1]).get("pid")
            lease = self._take() if before is None else None
            if lease is None and self._wish.holds:
                self._check_circle()
            return lease

    def _check_circle(self) -> None:
        from mlaunch.leases.caller.circles import in_words, stuck  # for a call in a rank that waits

        held = {
            device_of(name): self._site.said(name) for name in self._site.names(DEVICE) if _is_taken(self._site, name)
        }
        waiting = [self._site.said(name) for name in self._tickets() if _is_taken(self._site, name)]
        found = stuck(waiting, held)
        mine = next((one for one in found if one == self._said), None)
        if mine is not None:
            raise misuse(RuntimeError(in_words(mine, [one for one in found if one is not mine], held)))

    def _tickets(self) -> list[str]:
        """Return the tickets, in their order."""
        return [name for name in self._site.names(TICKET) if name.removeprefix(TICKET).isdecimal()]

    def close(self) -> None:
        """Leaves the queue. Whoever comes next finds that by itself, as with one that was killed."""
        self._unwatch()
        if self._ticket >= 0:
            try:
                with self._site:
                    self._site.remove(self._name)
            except FileNotFoundError:  # the directory was removed
                pass
            finally:
                self._drop_ticket()
        _open.difference_update(self._site.fds())
        self._site.close()

    def _drop_ticket(self) -> None:
        _open.discard(self._ticket)
        os.close(self._ticket)
        self._ticket = -1

    def _before(self) -> tuple[int, str] | None:
        """Returns the last ticket before ours whose owner lives and wants some of the same, with what watches it."""
        # Only the nearest one before us is watched: each end of a ticket then wakes one process, not the whole queue.
        for name in reversed(self._tickets()):
            if name >= self._name:
                continue
            try:
                watched = self._site.watch(name)
            except FileExistsError:  # something of a stranger's
                continue
            if watched is None:
                self._site.remove(name)
            elif set(self._wish.names) & set((said := self._site.said(name)).get("names", ())):
                if not _is_stopped(said):
                    return watched, name
                self._passed.append(f"{said.get('who') or '?'} (pid {said.get('pid')})")
                os.close(watched)
            else:
                os.close(watched)
        return None

    def _take(self) -> DeviceLease | None:
        """Takes the first that are free, if they are enough."""
        free = []
        for device in self._wish.names:
            name = file_of(device)
            watched = self._site.watch(name)
            if watched is None:
                free.append(device)
            else:
                self._watch(watched, name)
        if len(free) < self._wish.count:
            return None
        # All of them or none, under the lock: two that took theirs one by one would wait for each other.
        # With the directory itself, whose lock keeps systemd-tmpfiles from removing it while ranks run for days.
        names = tuple(free[: self._wish.count])
        before = {device: said for device in names if (said := self._site.said(file_of(device)))}
        lease = DeviceLease(names, [os.dup(self._site.fd)], before)
        _open.update(lease.fds)
        try:
            for device in lease.names:
                lease.fds.append(self._site.take(file_of(device), self._said))
                _open.add(lease.fds[-1])
        except BaseException:
            lease.close()
            raise
        # After the devices are held: the next in the queue is woken by this, and looks at once.
        self._site.remove(self._name)
        self._drop_ticket()
        return lease

    def _watch(self, fd: int, name: str) -> None:
        self._watched[fd] = name
        _open.add(fd)

    def _unwatch(self) -> None:
        fds, self._watched = list(self._watched), {}
        self._behind, self._passed = None, []
        _open.difference_update(fds)
        close_all(fds)


def file_of(device: str) -> str:
    """Returns the name of a device's FIFO."""
    return DEVICE + urllib.parse.quote(device, safe="")


def device_of(name: str) -> str:
    return urllib.parse.unquote(name.removeprefix(DEVICE))


def _let_go() -> None:
    """Closes what belongs to the parent, in a fork of it."""
    for fd in _open:
        with contextlib.suppress(OSError):
            os.close(fd)
    _open.clear()


# A lease is an open file, and a fork that outlives its parent would keep the devices.
in_forks(_let_go)


def standing(directory: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns what is held (device, pid, who, since), and who waits (names, count, pid, who, since) in their order.

    ``since`` is in seconds since 1970; who waits and is ``stopped`` is passed over. Both are empty where there is no
    directory.
    """
    if not directory.is_dir():
        return [], []
    with opened(directory) as site, site:
        held = [{"device": device_of(name), **site.said(name)} for name in site.names(DEVICE) if _is_taken(site, name)]
        waiting = [site.said(name) for name in site.names(TICKET) if _is_taken(site, name)]
        return held, [{**said, "stopped": True} if _is_stopped(said) else said for said in waiting]


def _is_stopped(said: Mapping[str, Any]) -> bool:
    """True if somebody has stopped (Ctrl-Z) the process that says this of itself: it takes nothing that is free."""
    return isinstance(said.get("pid"), int) and linux.is_stopped(said["pid"])


def _is_taken(site: LeaseDirectory, name: str) -> bool:
    try:
        watched = site.watch(name)
    except FileExistsError:  # something of a stranger's
        return False
    if watched is not None:
        os.close(watched)
    return watched is not None
