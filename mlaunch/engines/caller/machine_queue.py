"""The queue for the machines of an allocation. In order of arrival, each launch gets all machines it wants or none."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mlaunch.base.exceptions import LaunchError
from mlaunch.caller import interrupts
from mlaunch.engines.caller.launch.machine import Machine
from mlaunch.engines.caller.launch.machines import Machines


def _nothing() -> None: ...


@dataclass(eq=False)
class MachineClaim:
    """A launch's place in the queue, and then its machines.

    Attributes:
        count: How many machines are wanted; None: the whole allocation, whether its machines are there or not.
        notify: Called, under a lock, when ``take`` may succeed.
        end: A function that ends the launch which has the machines.
        ends: The claim is to give the allocation back.
        whole: It holds the whole allocation, which has too few machines left: first ask the engine for others.
    """

    count: int | None
    notify: Callable[[], None] = _nothing
    end: Callable[[], None] = _nothing
    ends: bool = False
    machines: list[Machine] = field(default_factory=list)
    whole: bool = False

    @property
    def lost(self) -> bool:
        """True if one of its machines is lost. Nobody gets that machine again."""
        return any(machine.lost for machine in self.machines)


class MachineQueue:
    """The queue of one allocation, for any thread. It gives lost machines to nobody."""

    def __init__(self, machines: Machines) -> None:
        # Not threading's: Ctrl-C within it can leave its lock taken, which would block every launch.
        self._changed = interrupts.Condition()
        self.closed = ""  # why nobody gets machines any more
        self._machines = machines
        self._row: deque[MachineClaim] = deque()
        self._holders: list[MachineClaim] = []

    @property
    def in_use(self) -> bool:
        """True if a launch has machines, or waits for them."""
        return bool(self._row or self._holders)

    def join(self, claim: MachineClaim) -> MachineClaim:
        """Put a claim at the end of the queue."""
        with self._changed:
            self._row.append(claim)
        return claim

    def take(self, claim: MachineClaim) -> bool:
        """If it is the claim's turn, give it its machines and return True. LaunchError if they were given back."""
        with self._changed:
            if self.closed and not claim.ends:
                raise LaunchError(f"this allocation was given back ({self.closed}); hold() another one")
            # Only the first claim: otherwise small ones would overtake a large one for ever.
            if self._row[0] is not claim or not self._give(claim):
                return False
            self._row.remove(claim)
            self._holders.append(claim)
            self._tell()
            return True

    def wait(self, claim: MachineClaim) -> None:
        """Wait until the claim has its machines. Can be interrupted."""
        with self._changed:
            while not self.take(claim):
                self._changed.wait()

    def _give(self, claim: MachineClaim) -> bool:
        left = [machine for machine in self._machines.machines if not machine.lost]
        # Too few are left: only a launch that has the whole allocation may ask the engine for others.
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
        """Take the claim's machines from an allocation that is complete again, and leave the others to other claims."""
        with self._changed:
            claim.machines, claim.whole = self._machines.machines[: claim.count], False
            self._tell()

    def leave(self, claim: MachineClaim) -> None:
        """Remove a claim from the queue, or give its machines to others. May be called again."""
        with self._changed:
            for some in (self._row, self._holders):
                if claim in some:
                    some.remove(claim)
            self._tell()

    def close(self, why: str) -> None:
        """Refuse all claims that wait or come later; claims that have machines keep them."""
        with self._changed:
            self.closed = self.closed or why
            self._tell()

    def end_all(self) -> None:
        """End all submitted launches that have machines."""
        with self._changed:
            for claim in self._holders:
                claim.end()

    def _tell(self) -> None:
        self._changed.notify_all()
        for claim in self._row:
            claim.notify()
