"""``mlaunch.stopping``: the reason if the ranks must stop, with the same answer at the same check on every rank.

    main thread      check: count -> is it frozen? --no--> continue
                                         \\--yes--> wait for the decision
    control thread   freeze -> tell the count ... stop at the highest count of all ranks, plus one

The main thread counts before it checks for the freeze; the control thread freezes before it reads the count. So either
the rank waits for the decision, or its check is among those that the decision counts, and no rank is past the step at
which all stop. (TSL's preemption sync manager does the same.)
"""

from __future__ import annotations

import threading

from mlaunch.agreed_stop.wire import CountChecks, FreezeChecks, StopAtCheck, ThawChecks
from mlaunch.base.fds import in_forks
from mlaunch.protocol import this_rank


class StopPoint:
    """The count of this rank's checks in its present call, and the check at which it must stop."""

    def __init__(self) -> None:
        # Reentrant: a signal handler may check during a check. Not the condition's own methods: an asynchronous
        # exception in their Python code could leave the lock taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._call = this_rank.call
        self._checks = 0
        self._alert = False  # a check must do more than count
        self._frozen = -1  # the call whose checks wait for a decision; -1: none
        self._decided = (-1, 0, "")  # the call, the check at which it stops, the reason

    def check(self) -> str:
        """Count a check. Return the reason to stop; "" if there is none."""
        with self._lock:
            self._take_call()
            self._checks += 1
            # Only a test of a flag in most cases: training loops call it at each step.
            return self._known() if self._alert else ""

    def _known(self) -> str:
        while self._frozen == self._call:
            self._changed.wait()
        call, check, reason = self._decided
        return reason if call == self._call and self._checks >= check else ""

    def _take_call(self) -> None:
        """Count from zero if another call runs on a rank that stays. The request for it may have come before."""
        if self._call != this_rank.call:
            self._call, self._checks = this_rank.call, 0
            self._note()

    def freeze(self, call: int) -> int:
        """Make checks in this call wait for a decision. Return how many there were."""
        with self._lock:
            self._take_call()
            self._frozen = call
            self._note()
            return self._checks if call == self._call else 0

    def thaw(self, call: int) -> None:
        """End the wait without a decision."""
        with self._lock:
            self._frozen = -1 if self._frozen == call else self._frozen
            self._note()

    def stop_at(self, call: int, check: int, reason: str) -> None:
        """Note the decision, and wake a check that waits for it."""
        with self._lock:
            self._decided = call, check, reason
        # After the decision is set: a check that wakes without it would return "".
        self.thaw(call)

    def checks(self, call: int | None = None) -> int:
        """Return how often this rank has checked in a call; None: the present one."""
        with self._lock:
            self._take_call()
            return self._checks if call in {None, self._call} else 0

    def _note(self) -> None:
        self._alert = self._call in {self._frozen, self._decided[0]}
        self._changed.notify_all()


_point = StopPoint()  # of this rank


def _renew() -> None:
    """Start from zero in a fork of a rank, which nobody asks to stop. Another thread may have held the old lock."""
    global _point  # noqa: PLW0603 - a fact about this process
    _point = StopPoint()


in_forks(_renew)


def answer(about: FreezeChecks | CountChecks) -> int:
    """Return how often this rank has checked. Called in the control thread."""
    return _point.freeze(about.call) if isinstance(about, FreezeChecks) else _point.checks(about.call)


def hear(word: ThawChecks | StopAtCheck) -> None:
    """Handle a decision, or the end of the freeze without one. Called in the control thread."""
    if isinstance(word, StopAtCheck):
        _point.stop_at(word.call, word.check, word.reason)
    else:
        _point.thaw(word.call)


def turns() -> int:
    """Return how often this rank has checked in its present call."""
    return _point.checks()


def stopping() -> str:
    """Return the reason if this run must stop, such as "TERM" or "asked", which is true; else "".

    Call it once per step on every rank. If it returns a reason, save and return. All ranks get the same answer at the
    same call of it: it depends on the step that the ranks have agreed on, not on the moment at which a signal comes. It
    enters no collective, and takes a fraction of a microsecond.

    In a process that is not a rank of a launch it returns "".

    Example:
        >>> @launcher(n_gpus=4, stop_on="TERM,USR1", stop_grace=600)
        ... def train():
        ...     for step in range(start, steps):
        ...         ...
        ...         if mlaunch.stopping():
        ...             return save(step)
    """
    return _point.check()
