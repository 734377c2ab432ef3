"""The sets of ranks that tests share: one for each shape, for the session, as long as its ranks are in step."""

from __future__ import annotations

import contextlib

import pytest

from mlaunch.base.exceptions import LaunchError
from mlaunch.pytest.caller import coverage_plan, xdist_workers
from mlaunch.pytest.caller.mark import ON_RANKS, Shape
from mlaunch.pytest.caller.shared_ranks import SharedRanks, Wide

_SETS_ON_CPUS = 4


class RankPool:
    """The sets of a session, the one that was used last at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.sets: dict[Shape, SharedRanks] = {}
        self.wide: Wide = {}
        self.suspects: set[int] = set()  # of these values
        self._next: SharedRanks | None = None  # that were started ahead

    def of(self, shape: Shape) -> SharedRanks:
        """Returns the set of this shape; a new one, if there is none or its ranks have ended. ValueError as Ranks."""
        found = self.sets.get(shape)
        if found is not None and not (found.gone or found.is_out_of_step):
            self.sets[shape] = self.sets.pop(shape)
            return found
        self.drop(shape)
        self._make_room(shape)
        xdist_workers.warn_of_cores(shape)
        self.sets[shape] = made = self._started_ahead(shape) or SharedRanks(shape, self._config, self)
        return made

    def _started_ahead(self, shape: Shape) -> SharedRanks | None:
        found = self._next
        if found is None or found.shape != shape:
            return None
        self._next = None
        if found.is_ready():
            return found
        found.close()
        return None

    def start_ahead(self) -> None:
        """Starts ranks, if need be, that take the place of those used last, should these be lost; does not wait.

        On CPUs alone, where others have no use for what they hold.
        """
        if not (self._config.getini("ranks_reserve") and self.sets):
            return
        # Several workers have no cores to spare; and what records coverage would record the ranks in reserve, too.
        if xdist_workers.count() > 1 or coverage_plan.plan(self._config) is not None:
            return
        like = list(self.sets.values())[-1]
        if self._next is not None and self._next.shape != like.shape:
            self._next.close()
            self._next = None
        if self._next is None and like.shape.device_type == "cpu":
            with contextlib.suppress(LaunchError, OSError, ValueError):  # a limit; those who need them will hear of it
                self._next = SharedRanks(like.shape, self._config, self, like)

    def suspect(self, item: pytest.Function) -> None:
        """Note which values of wider scope another fixture of a test asks for, which may change them."""
        for fixtures in item._fixtureinfo.name2fixturedefs.values():
            if getattr(fixtures[-1].func, ON_RANKS, False):
                continue
            for name in fixtures[-1].argnames:
                if name in item.funcargs and id(item.funcargs[name]) in self.wide:
                    self.suspects.add(id(item.funcargs[name]))

    def forget(self, owner: object) -> None:
        """Frees the values of a fixture that is torn down."""
        for key in [key for key, (whose, _) in self.wide.items() if whose is owner]:
            del self.wide[key]
            self.suspects.discard(key)
            for shared in self.sets.values():
                if (held := shared.fixtures.pop((owner, key), None)) is not None:
                    held.free()

    def drop(self, shape: Shape) -> None:
        """Ends the set of this shape, if there is one."""
        found = self.sets.pop(shape, None)
        if found is not None:
            found.close()

    def give_back(self) -> None:
        """Ends the sets whose devices other xdist workers wait for; to be called between two tests."""
        for shape in [shape for shape, shared in self.sets.items() if shared.is_due]:
            self.drop(shape)

    def close(self) -> None:
        """Ends all sets."""
        for shape in list(self.sets):
            self.drop(shape)
        if self._next is not None:
            self._next.close()
            self._next = None

    def _make_room(self, shape: Shape) -> None:
        """Ends sets on the same accelerators, and on CPUs those unused for longest where there are many."""
        alike = [other for other in self.sets if other.device_type == shape.device_type]
        # On accelerators one: two sets would share their memory.
        most = _SETS_ON_CPUS if shape.device_type == "cpu" else 1
        for other in alike[: max(0, len(alike) - most + 1)]:
            self.drop(other)


def only_devices_lack(error: ValueError, shape: Shape) -> bool:
    """Tells whether this machine has too few devices for a shape, or none of the kind."""
    return shape.device_type != "cpu" and ("visible here" in str(error) or "no such device" in str(error))
