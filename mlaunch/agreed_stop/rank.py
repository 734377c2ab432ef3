"""``mlaunch.stopping``: True if the ranks are to stop, with the same answer at the same look on every rank.

    main thread      look: count -> is it frozen? --no--> go on
                                         \\--yes--> wait for the decision
    control thread   freeze -> tell the count ... stop at the highest count of all ranks, plus one

The count comes before the question whether it is frozen, here, and after the freeze there: a rank either waits for the
decision, or its look is among those that the decision counts. So no rank is past the step at which all stop. (As
TSL's preemption sync manager does it.)
"""

from __future__ import annotations

import threading

from mlaunch.agreed_stop.wire import FreezeLooks, StopAtLook, TellLooks, ThawLooks
from mlaunch.base.fds import in_forks
from mlaunch.protocol import this_rank


class StopPoint:
    """How often this rank has looked in its present call, and where it is to stop."""

    def __init__(self) -> None:
        # A signal handler in a look may take it once more. Used in place of the condition, of whose Python an exception
        # from outside might come into the middle, and leave it taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._call = this_rank.call
        self._looks = 0
        self._alert = False  # there is something to be known at a look
        self._frozen = -1  # the call whose looks wait for a decision; -1: none
        self._decided = (-1, 0, "")  # the call, the look at which it stops, the reason

    def look(self) -> str:
        """Count a look; return the reason to stop, "" for none."""
        with self._lock:
            self._take_call()
            self._looks += 1
            # One look at a flag: it is asked at each step of a training loop, and mostly there is nothing to be
            # known.
            return self._known() if self._alert else ""

    def _known(self) -> str:
        while self._frozen == self._call:
            self._changed.wait()
        call, look, reason = self._decided
        return reason if call == self._call and self._looks >= look else ""

    def _take_call(self) -> None:
        """Count from zero in another call, on a rank that stays. A request may have come before its call."""
        if self._call != this_rank.call:
            self._call, self._looks = this_rank.call, 0
            self._note()

    def freeze(self, call: int) -> int:
        """Make looks in this call wait for a decision, and return how many there were."""
        with self._lock:
            self._take_call()
            self._frozen = call
            self._note()
            return self._looks if call == self._call else 0

    def thaw(self, call: int) -> None:
        """End the wait without a decision."""
        with self._lock:
            self._frozen = -1 if self._frozen == call else self._frozen
            self._note()

    def stop_at(self, call: int, look: int, reason: str) -> None:
        """Take the decision."""
        with self._lock:
            self._decided = call, look, reason
        # After the decision is there: a look that wakes without it would go on.
        self.thaw(call)

    def looks(self, call: int | None = None) -> int:
        """Return how often this rank has looked in that call; None: the present one."""
        with self._lock:
            self._take_call()
            return self._looks if call in {None, self._call} else 0

    def _note(self) -> None:
        self._alert = self._call in {self._frozen, self._decided[0]}
        self._changed.notify_all()


_point = StopPoint()  # of this rank


def _renew() -> None:
    """Start from zero in a fork of a rank, which nobody asks to stop. Someone may hold the old lock for ever."""
    global _point  # noqa: PLW0603 - a fact about this process
    _point = StopPoint()


in_forks(_renew)


def answer(about: FreezeLooks | TellLooks) -> int:
    """Return how often this rank has looked, in the control thread."""
    return _point.freeze(about.call) if isinstance(about, FreezeLooks) else _point.looks(about.call)


def hear(word: ThawLooks | StopAtLook) -> None:
    """Take a decision, or that there is none, in the control thread."""
    if isinstance(word, StopAtLook):
        _point.stop_at(word.call, word.look, word.reason)
    else:
        _point.thaw(word.call)


def turns() -> int:
    """Return how often this rank has looked in its present call."""
    return _point.looks()


def stopping() -> str:
    """Return the reason if this run is to stop, such as "TERM" or "asked", which is true; else "".

    Call it once per step on every rank. All ranks get the same answer at the same call of it: not the moment at which a
    signal comes counts, but the step that the ranks have agreed on. It enters no collective, and takes a fraction of a
    microsecond. Save then, and return.

    In a process that is no rank of a launch it returns "".

    Example:
        >>> @launcher(n_gpus=4, stop_on="TERM,USR1", stop_grace=600)
        ... def train():
        ...     for step in range(start, steps):
        ...         ...
        ...         if mlaunch.stopping():
        ...             return save(step)
    """
    return _point.look()
