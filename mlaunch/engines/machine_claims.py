"""The queue for the machines of an allocation: each launch gets, in order of arrival, all that it wants or none."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mlaunch.base.exceptions import LaunchError
from mlaunch.caller import interrupts
from mlaunch.engines.launch.machine import Machine
from mlaunch.engines.launch.machines import Machines


def _nothing() -> None: ...


class MachineQueue:
    """Of one allocation, for any thread. A machine that is lost is given to nobody."""

    def __init__(self, machines: Machines) -> None:
        # Not threading's: Ctrl-C within it can leave its lock taken, with every launch behind it.
        self.changed = interrupts.Condition()
        self.closed = ""  # why nobody gets machines any more
        self._machines = machines
        self._row: deque[MachineClaim] = deque()
        self._holders: list[MachineClaim] = []

    @property
    def in_use(self) -> bool:
        """Whether some launch has machines, or waits for them."""
        return bool(self._row or self._holders)

    def join(self, count: int | None, notify: Callable[[], None] = _nothing, *, ends: bool = False) -> MachineClaim:
        """Gets in line for so many; None: for the allocation, whether its machines are there or not.

        ``notify`` is called, under a lock, when ``take`` may have something to give. ``ends``: to give it back.
        """
        claim = MachineClaim(self, count, notify, ends=ends)
        with self.changed:
            self._row.append(claim)
        return claim

    def take(self, claim: MachineClaim) -> bool:
        """See ``MachineClaim.take``."""
        with self.changed:
            if self.closed and not claim.ends:
                raise LaunchError(f"this allocation was given back ({self.closed}); hold() another one")
            # Only the first: a launch that wants many would wait for ever behind small ones that overtake it.
            if self._row[0] is not claim or not self._give(claim):
                return False
            self._row.remove(claim)
            self._holders.append(claim)
            self._tell()
            return True

    def _give(self, claim: MachineClaim) -> bool:
        left = [machine for machine in self._machines.machines if not machine.lost]
        # Too few are left: only a launch that has all of them may ask the engine for others.
        if claim.count is None or len(left) < claim.count:
            claim.whole = not self._holders
            return claim.whole
        taken = {machine for holder in self._holders for machine in holder.machines}
        free = [machine for machine in left if machine not in taken]
        if any(holder.whole for holder in self._holders) or len(free) < claim.count:
            return False
        claim.machines = free[: claim.count]
        return True

    def narrow(self, claim: MachineClaim) -> None:
        """Leaves the rest of an allocation to others."""
        with self.changed:
            claim.machines, claim.whole = self._machines.machines[: claim.count], False
            self._tell()

    def leave(self, claim: MachineClaim) -> None:
        """See ``MachineClaim.close``."""
        with self.changed:
            for some in (self._row, self._holders):
                if claim in some:
                    some.remove(claim)
            self._tell()

    def close(self, why: str) -> None:
        """Refuses all who wait and will come; who has machines keeps them."""
        with self.changed:
            self.closed = self.closed or why
            self._tell()

    def end_all(self) -> None:
        """Ends all launches of several that have machines."""
        with self.changed:
            for claim in self._holders:
                claim.end()

    def _tell(self) -> None:
        self.changed.notify_all()
        for claim in self._row:
            claim.notify()


class MachineClaim:
    """A place in the queue, and what it has come to. ``whole``: the allocation, to which nothing else may happen."""

    def __init__(self, queue: MachineQueue, count: int | None, notify: Callable[[], None], *, ends: bool) -> None:
        self._queue, self.count, self.notify, self.ends = queue, count, notify, ends
        self.end: Callable[[], None] = _nothing  # ends the launch whose place it is
        self.machines: list[Machine] = []
        self.whole = False

    def take(self) -> bool:
        """Tells whether it has its machines now; ``whole``, if others must be asked for first.

        Raises:
            LaunchError: The allocation was given back.
        """
        return self._queue.take(self)

    def wait(self) -> None:
        """Waits for them. Can be interrupted."""
        with self._queue.changed:
            while not self.take():
                self._queue.changed.wait()

    def narrow(self) -> None:
        """Takes its machines of an allocation that is whole again, and leaves the others to others."""
        self._queue.narrow(self)

    def close(self) -> None:
        """Leaves the queue, or gives the machines to others. May be called again."""
        self._queue.leave(self)
