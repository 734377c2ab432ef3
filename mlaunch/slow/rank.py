"""A rank's record of how long it waits for others, for as long as its function runs.

    main thread     ProcessGroup.allreduce, ... --its number--> open --Work.wait: how long--> closed
                    each 4th step of DistributedDataParallel: what that has measured -------> closed
    control thread  answers the agent with what was closed since the last time

Only on CPUs: ``Work.wait`` does not wait for a device's work. DistributedDataParallel begins and awaits its collectives
in C++, out of Python's sight, but measures times of its own, also of a device.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from array import array
from collections.abc import Callable, Iterator
from typing import Any

from mlaunch.core.parts import RankPart
from mlaunch.slow.wire import SlowTerms, TellWaits, Waits, WaitsOfRank
from mlaunch.torch_parts import model_times, operations, process_groups

Method = Callable[..., Any]

_MOST = 4096  # operations that a lane keeps until the agent asks for them
_FEW = 1024  # operations that nobody has waited for, before finished ones are dropped
_STEPS = 4  # one of so many steps of a model is measured: reading its times takes about 0.1 ms
_LONG = 0.05  # seconds of a step; if steps take longer, each is measured
# In these, not all wait for all: the sender leaves first, the receiver last.
_ONE_SIDED = {"broadcast", "reduce", "gather", "gather_single", "gather_into_tensor", "scatter"}


class OwnLane:
    """A rank's record of operations that all members number in the same way. ``members``: their global ranks."""

    __slots__ = ("closed", "known", "members", "number")

    def __init__(self, members: tuple[int, ...], group: Any = None) -> None:
        self.members = members
        self.known = weakref.ref(group) if group is not None else None
        self.number = 0
        self.closed: list[tuple[int, float]] = []  # number, seconds of waiting

    def close(self, number: int, waited: float) -> None:
        self.closed.append((number, waited))
        if len(self.closed) >= _MOST:
            del self.closed[: _MOST // 2]

    def take(self) -> Waits:
        """Return the operations that were closed since the last time. For the control thread."""
        taken, self.closed = self.closed, []
        return Waits(self.members, array("q", [row[0] for row in taken]), array("d", [row[1] for row in taken]))


class WaitLog:
    """The record of this rank's waits. ``lanes``: by the names that all members know."""

    def __init__(self) -> None:
        self.lanes: dict[str, OwnLane] = {}
        self.waited = 0.0  # seconds, in all
        self._by_group: dict[int, OwnLane] = {}  # by id
        self._open: dict[int, tuple[weakref.ref[Any], OwnLane, int]] = {}  # by id of the work; not kept alive
        self._told = time.monotonic(), 0.0

    def begun(self, group: Any, work: Any) -> None:
        """Note that a collective has begun."""
        lane = self._by_group.get(id(group))
        if lane is None or lane.known is None or lane.known() is not group:
            lane = self._lane_of(group)
        lane.number += 1
        if work is not None:
            if len(self._open) >= _FEW:
                self._open.clear()
            self._open[id(work)] = weakref.ref(work), lane, lane.number

    def spend(self, wait: Method, *args: Any, **kwargs: Any) -> Any:
        """Call ``wait``, which waits for other ranks, and note how long it took."""
        since = time.monotonic()
        try:
            return wait(*args, **kwargs)
        finally:
            self.waited += time.monotonic() - since

    def await_end(self, wait: Method, work: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``wait``, which waits for the end of an operation, and note how long it took."""
        since = time.monotonic()
        done = wait(work, *args, **kwargs)
        waited = time.monotonic() - since
        self.waited += waited
        found = self._open.pop(id(work), None)
        if found is not None and found[0]() is work:
            found[1].close(found[2], waited)
        return done

    def take(self) -> WaitsOfRank:
        """Return this rank's waits since the last time. For the control thread."""
        (since, before), now, waited = self._told, time.monotonic(), self.waited
        self._told = now, waited
        return WaitsOfRank(now - since, waited - before, {name: lane.take() for name, lane in [*self.lanes.items()]})

    def _lane_of(self, group: Any) -> OwnLane:
        """Return the lane of a group. For a group that torch does not know, it is one that is never reported."""
        import torch.distributed as dist

        try:
            name, members = process_groups.name_of(group), tuple(dist.get_process_group_ranks(group))
        except (KeyError, ValueError, RuntimeError):
            name, members = "", ()
        lane = self._by_group[id(group)] = OwnLane(members, group)
        if name:
            self.lanes[name] = lane
        return lane


class ModelLog:
    """The times that DistributedDataParallel measures of its steps: a lane for each model."""

    def __init__(self, log: WaitLog) -> None:
        self._log = log
        self._of_reducer: dict[int, OwnLane] = {}  # by id
        self._models: dict[int, Model] = {}  # by id of the logger

    def made(self, reducer: Any, args: tuple[Any, ...]) -> None:
        """Note that the reducer of a model's gradients was made."""
        import torch.distributed as dist

        group = model_times.group_of(args)
        lane = self._of_reducer[id(reducer)] = OwnLane(tuple(dist.get_process_group_ranks(group)))
        self._log.lanes[f"model {len(self._of_reducer)} of {process_groups.name_of(group)}"] = lane

    def given(self, reducer: Any, args: tuple[Any, ...]) -> None:
        """Note which logger reads the reducer's times, and make the reducer measure more often."""
        if (lane := self._of_reducer.get(id(reducer))) is not None:
            self._models[id(args[0])] = Model(self._log, lane, weakref.ref(reducer))
            model_times.measure(reducer, _STEPS)

    def step(self, logger: Any, _args: tuple[Any, ...]) -> None:
        """Note that a step begins, and read the times of the step before it, if that one was measured."""
        if (model := self._models.get(id(logger))) is not None:
            model.step(logger)


class Model:
    """The steps of one model. ``reducer``: returns the object that measures them, or None once it is gone."""

    def __init__(self, log: WaitLog, lane: OwnLane, reducer: Callable[[], Any]) -> None:
        self._log, self._lane, self._reducer = log, lane, reducer
        self._steps, self._every, self._read_at, self._latest = 0, _STEPS, 0.0, 0

    def step(self, logger: Any) -> None:
        self._steps += 1
        if self._steps % self._every:
            return
        now, before = time.monotonic(), self._read_at
        self._read_at = now
        self._read(logger)
        if before and self._every > 1 and now - before > _LONG * self._every:
            self._every = 1
            if (reducer := self._reducer()) is not None:
                model_times.measure(reducer, 1)

    def _read(self, logger: Any) -> None:
        told = model_times.latest(logger)
        if told is not None and told[0] > self._latest:
            number, waited = told
            # It counts the steps between as equal to this one.
            self._log.waited += waited * min(number - self._latest, self._every)
            self._latest = number
            self._lane.close(number, waited)


class WaitingRank(RankPart):
    """A rank of a launch with ``slow=``."""

    @contextlib.contextmanager
    def around_call(self) -> Iterator[None]:
        """Record the rank's waits while the function runs."""
        log = WaitLog()
        with contextlib.ExitStack() as stack:
            stack.callback(_present.clear)
            _time_groups(log, stack)
            _time_models(log, stack)
            _present[:] = [log]
            yield


_present: list[WaitLog] = []


def part(_section: SlowTerms, _rank: int) -> WaitingRank:
    """Make a rank's part."""
    return WaitingRank()


def answer(_about: TellWaits) -> WaitsOfRank | None:
    """Return this rank's waits since the last time, for the agent; None if its function does not run."""
    return next((log.take() for log in _present[:1]), None)


def _time_groups(log: WaitLog, stack: contextlib.ExitStack) -> None:
    from torch._C import _distributed_c10d as c10d

    def numbered(begin: Method) -> Method:
        def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            work = begin(self, *args, **kwargs)
            log.begun(self, work)
            return work

        return collective

    def waiting(wait: Method) -> Method:
        return lambda self, *args, **kwargs: log.await_end(wait, self, *args, **kwargs)

    groups, work = getattr(c10d, "ProcessGroup", object), getattr(c10d, "Work", object)
    for name in (name for name, words in operations.COLLECTIVES.items() if words not in _ONE_SIDED):
        _replace(groups, name, numbered, stack)
    _replace(groups, "monitored_barrier", lambda wait: lambda *args, **given: log.spend(wait, *args, **given), stack)
    _replace(work, "wait", waiting, stack)


def _time_models(log: WaitLog, stack: contextlib.ExitStack) -> None:
    models = ModelLog(log)
    for kind, name, note in model_times.places(models.made, models.given, models.step):
        _replace(kind, name, _and_then(note), stack)
    _replace(*model_times.buffers_sender(), lambda send: lambda *args, **given: log.spend(send, *args, **given), stack)


def _and_then(note: model_times.Noted) -> Callable[[Method], Method]:
    """Return a decorator for methods that then call ``note`` afterwards, with the object and the arguments."""

    def make(method: Method) -> Method:
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = method(self, *args, **kwargs)
            note(self, args)
            return found

        return noted

    return make


def _replace(owner: Any, name: str, make: Callable[[Method], Method], stack: contextlib.ExitStack) -> None:
    """Replace a method, or a module's function, until the stack is closed."""
    if (before := vars(owner).get(name)) is not None:
        operations.replace(owner, name, lambda begin, _: make(begin), "")
        stack.callback(setattr, owner, name, before)
