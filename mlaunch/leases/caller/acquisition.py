"""The queue for devices: in order of arrival, a launch takes all that it wants or none.

    ticket --all tickets before it that want some of the same are gone--> first --enough are free--> lease

A waiter watches one ticket, the last before its own that wants some of the same devices; only the first watches
devices. So each end wakes one process and not all. The order is strict: later launches do not overtake one that wants
many, unless its process is stopped. A launch that would close a circle of waiting launches is refused.
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
from mlaunch.base.exceptions import misuse
from mlaunch.base.fds import close_all, in_forks
from mlaunch.base.frozen_record import frozen_record
from mlaunch.leases.caller.lease_directory import LeaseDirectory, opened

DEVICE, TICKET = "device.", "ticket."
_STOPPED_EVERY = 1.0  # seconds between checks that the process before us is not stopped
Said = Mapping[str, Any]  # the record of a waiter or holder
_open: set[int] = set()  # descriptors that a fork of this process must not hold: it would keep devices from others


@frozen_record
class Wish:
    """A wish for ``count`` of the devices with these names, the first that are free. ``who``: for people, "train()".

    ``holds``: devices of the launch whose rank asks.
    """

    names: Sequence[str]
    count: int
    who: str = ""
    holds: Sequence[str] = ()


@dataclass
class DeviceLease:
    """Devices that belong to a launch as long as any process holds the descriptors.

    ``before``: by device, the last launch that had it, if there was one.
    """

    names: tuple[str, ...]
    fds: list[int] = field(default_factory=list)
    before: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def close(self) -> None:
        """Close the descriptors in this process; others may keep theirs."""
        fds, self.fds = self.fds, []
        _open.difference_update(fds)
        close_all(fds)


class Acquisition:
    """A place in the queue. Wait until one of ``fds()`` is ready, then ``step()``, until that returns the lease."""

    def __init__(self, directory: Path, wish: Wish) -> None:
        """Take a ticket. OSError if there can be no leases."""
        self._wish = wish
        self._directory = LeaseDirectory(directory)
        self._said = {"pid": os.getpid(), "who": wish.who, "since": time.time()}
        self._watched: dict[int, str] = {}
        self._behind: int | None = None  # the process of the watched ticket
        self._passed: list[str] = []  # stopped processes before us
        self._ticket = -1
        _open.update(self._directory.fds())
        try:
            with self._directory:
                last = max((int(name.removeprefix(TICKET)) for name in self._tickets()), default=0)
                # By the clock, so that numbers continue after all tickets were removed; it may have been set back.
                self.number = max(last + 1, time.time_ns())
                self._said = {**self._said, "names": list(wish.names), "count": wish.count, "holds": list(wish.holds)}
                self._ticket = self._directory.take(self._name, self._said)
                _open.add(self._ticket)
        except BaseException:
            self.close()
            raise

    @property
    def _name(self) -> str:
        return f"{TICKET}{self.number:020}"

    def fds(self) -> list[int]:
        """Return descriptors that hang up when ``step`` has something to do."""
        return list(self._watched)

    def waits_for(self) -> str:
        """Return for whom it waits: "search() (pid 7)", and others."""
        with self._directory:
            holders = [self._directory.said(name) for name in self._watched.values()]
        found = [f"{said.get('who') or '?'} (pid {said.get('pid')})" for said in holders]
        return ", ".join(
            dict.fromkeys([*found, *(f"{one}, which has stopped and is passed over" for one in self._passed)])
        )

    def timeout(self) -> float | None:
        """Return the seconds until ``step`` is due though nothing is ready; None: it is not."""
        # There is no notice of a process that is stopped or continued.
        return _STOPPED_EVERY if self._behind is not None or self._passed else None

    def prefer(self, names: Sequence[str]) -> None:
        """Prefer the devices in this order from now on."""
        self._wish = dataclasses.replace(self._wish, names=names)

    def step(self) -> DeviceLease | None:
        """Try to take the devices; None: it is not our turn, or too few are free.

        Raises:
            RuntimeError: A deadlock: those for whom we wait, wait for devices of the launch that we are in.
            OSError: The directory was removed, or another file has the name of a device's.
        """
        self._unwatch()
        with self._directory:
            before = self._before()
            if before is not None:
                self._watch(*before)
                self._behind = self._directory.said(before[1]).get("pid")
            lease = self._take() if before is None else None
            if lease is None and self._wish.holds:
                self._check_circle()
            return lease

    def _check_circle(self) -> None:
        held = {
            device_of(name): self._directory.said(name)
            for name in self._directory.names(DEVICE)
            if _is_taken(self._directory, name)
        }
        waiting = [self._directory.said(name) for name in self._tickets() if _is_taken(self._directory, name)]
        found = stuck(waiting, held)
        mine = next((one for one in found if one == self._said), None)
        if mine is not None:
            raise misuse(RuntimeError(_deadlock(mine, [one for one in found if one is not mine], held)))

    def _tickets(self) -> list[str]:
        """Return the tickets, in their order."""
        return [name for name in self._directory.names(TICKET) if name.removeprefix(TICKET).isdecimal()]

    def close(self) -> None:
        """Leave the queue. The next notices it by itself, as if this process were killed."""
        self._unwatch()
        if self._ticket >= 0:
            try:
                with self._directory:
                    self._directory.remove(self._name)
            except FileNotFoundError:  # the directory was removed
                pass
            finally:
                self._drop_ticket()
        _open.difference_update(self._directory.fds())
        self._directory.close()

    def _drop_ticket(self) -> None:
        _open.discard(self._ticket)
        os.close(self._ticket)
        self._ticket = -1

    def _before(self) -> tuple[int, str] | None:
        """Return the last ticket before ours of a living process that wants some of the same; and its watch."""
        for name in reversed(self._tickets()):
            if name >= self._name:
                continue
            try:
                watched = self._directory.watch(name)
            except FileExistsError:  # another kind of file
                continue
            if watched is None:
                self._directory.remove(name)
            elif set(self._wish.names) & set((said := self._directory.said(name)).get("names", ())):
                if not _is_stopped(said):
                    return watched, name
                self._passed.append(f"{said.get('who') or '?'} (pid {said.get('pid')})")
                os.close(watched)
            else:
                os.close(watched)
        return None

    def _take(self) -> DeviceLease | None:
        """Take the first free devices, if there are enough."""
        free = []
        for device in self._wish.names:
            name = file_of(device)
            watched = self._directory.watch(name)
            if watched is None:
                free.append(device)
            else:
                self._watch(watched, name)
        if len(free) < self._wish.count:
            return None
        # All of them or none, under the lock: two that took them one by one would wait for each other. And the
        # directory: its lock keeps systemd-tmpfiles from removing it while ranks run for days.
        names = tuple(free[: self._wish.count])
        before = {device: said for device in names if (said := self._directory.said(file_of(device)))}
        lease = DeviceLease(names, [os.dup(self._directory.fd)], before)
        _open.update(lease.fds)
        try:
            for device in lease.names:
                lease.fds.append(self._directory.take(file_of(device), self._said))
                _open.add(lease.fds[-1])
        except BaseException:
            lease.close()
            raise
        # After the devices are held: this wakes the next in the queue.
        self._directory.remove(self._name)
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
    """Return the name of a device's FIFO."""
    return DEVICE + urllib.parse.quote(device, safe="")


def device_of(name: str) -> str:
    return urllib.parse.unquote(name.removeprefix(DEVICE))


def _let_go() -> None:
    """Close the parent's descriptors in a fork: it could outlive the parent, and keep the devices."""
    for fd in _open:
        with contextlib.suppress(OSError):
            os.close(fd)
    _open.clear()


in_forks(_let_go)


def standing(directory: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return held devices (device, pid, who, since), and the queue (names, count, pid, who, since).

    ``since`` is in seconds since 1970; a waiting process that is ``stopped`` is passed over. Both are empty without a
    directory.
    """
    if not directory.is_dir():
        return [], []
    with opened(directory) as found, found:
        held = [
            {"device": device_of(name), **found.said(name)} for name in found.names(DEVICE) if _is_taken(found, name)
        ]
        waiting = [found.said(name) for name in found.names(TICKET) if _is_taken(found, name)]
        return held, [{**said, "stopped": True} if _is_stopped(said) else said for said in waiting]


def _is_stopped(said: Mapping[str, Any]) -> bool:
    """True if the process that has said this is stopped (Ctrl-Z), so it would not take what is free."""
    return isinstance(said.get("pid"), int) and linux.is_stopped(said["pid"])


def _is_taken(directory: LeaseDirectory, name: str) -> bool:
    try:
        watched = directory.watch(name)
    except FileExistsError:  # another kind of file
        return False
    if watched is not None:
        os.close(watched)
    return watched is not None


# Deadlocks: a rank of each launch has started one that waits for devices of another. The circle closes when a launch
# joins the queue, which is refused then.


def stuck(waiting: Sequence[Said], held: Mapping[str, Said]) -> list[Said]:
    """Return those of ``waiting``, in its order, that would wait for ever; ``held``: the holder of each device.

    A launch without a waiting rank ends at some time. One with a waiting rank holds its devices until that one has had
    its turn, so they count as free only then.
    """
    left = list(waiting)
    while True:
        kept = {name for one in left for name in one.get("holds", ())} & held.keys()
        for number, one in enumerate(left):
            names = set(one.get("names", ()))
            is_first = names.isdisjoint(name for other in left[:number] for name in other.get("names", ()))
            if is_first and len(names - kept) >= one.get("count", 0):
                break
        else:
            return left
        left.remove(one)


def _deadlock(mine: Said, others: Sequence[Said], held: Mapping[str, Said]) -> str:
    """Return the error: who waits for whom. ``others``: the others of the circle."""
    rest = " and ".join(f"{_name(one)}, {_place(one, held)}" for one in others)
    return (
        f"{mine['who']} would deadlock: it wants {mine['count']} of {_names(mine)} and waits for {rest}, while the "
        f"launch that it runs inside, {_holders(mine, held)}, holds {', '.join(mine['holds'])} until this rank "
        f"returns. Launch it without a lease, or on other devices"
    )


def _place(one: Said, held: Mapping[str, Said]) -> str:
    """Return where another one of the circle waits."""
    if not one.get("holds"):
        return f"which came before it and wants {one['count']} of {_names(one)}"
    return f"which is called in {_holders(one, held)}, on {', '.join(one['holds'])}, and wants {_names(one)}"


def _names(one: Said) -> str:
    return ", ".join(one["names"])


def _holders(one: Said, held: Mapping[str, Said]) -> str:
    return ", ".join(dict.fromkeys(_name(held[name]) for name in one["holds"] if name in held)) or "?"


def _name(one: Said) -> str:
    return f"{one.get('who') or '?'} (pid {one.get('pid', '?')})"
