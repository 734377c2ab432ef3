"""Fixtures that are set up and torn down on the ranks of the test that asks for them."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from mlaunch.pytest.caller.mark import ON_RANKS, POOL, Shape
from mlaunch.pytest.rank.fixtures_of_rank import Key, OnRank, rank_0s_value, register
from mlaunch.pytest.wire import Definition, FixtureStep, RankTest

if TYPE_CHECKING:
    from mlaunch.pytest.caller.shared_ranks import SharedRanks

F = TypeVar("F", bound=Callable[..., Any])

_numbers = itertools.count(1)
_ON_RANKS = ("monkeypatch", "pytestconfig", "request")  # pytest's fixtures that a fixture can use on ranks


def rank_fixture(function: F | None = None, *, ranks: int | None = None, **options: Any) -> Any:
    """Make a fixture that is set up on the ranks of the test, and torn down there.

    Each rank has its own value, which never leaves it: a model, a mesh, a process group. If ranks are replaced, the
    fixture is set up again on the new ones.

    Args:
        ranks: Set it up on this many ranks in place of the test's; the test then gets rank 0's value, which must be
            picklable. For what 4 ranks save and 2 load.
        **options: Those of ``pytest.fixture``: scope, params, ids, name, autouse.

    Example:
        >>> @rank_fixture(scope="module")
        ... def mesh():
        ...     return init_device_mesh("cpu", (2, 2))
    """
    if function is None:
        return lambda found: rank_fixture(found, ranks=ranks, **options)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"rank_fixture {function.__name__!r} is async: write def, and asyncio.run() inside")
    return pytest.fixture(**options)(_stand_in(function, register(function), ranks))


def _stand_in(function: Callable[..., Any], key: Key, size: int | None) -> Callable[..., Any]:
    """Return the fixture that pytest sees: of the same name and arguments, and with ``request``."""
    signature = inspect.signature(function)
    names = list(signature.parameters)
    method = names[:1] == ["self"]

    def stand_in(*instance: object, request: pytest.FixtureRequest, **values: Any) -> Iterator[Any]:
        wanted = {name: value for name, value in values.items() if name in names}
        fixture = RankFixture(request, function, key, wanted, instance[0] if instance else None, names)
        with contextlib.closing(fixture):
            yield fixture if size is None else fixture.value_of(size)

    ours = [inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    theirs = [parameter for parameter in signature.parameters.values() if parameter.name != "request"]
    # pytest reads the names of arguments there, to set up other fixtures first; of a method it leaves out the first.
    parameters = [*theirs[:1], *ours, *theirs[1:]] if method else [*ours, *theirs]
    stand_in.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(stand_in, name, getattr(function, name))
    stand_in.__dict__[ON_RANKS] = True
    return stand_in


class RankFixture:
    """A stand-in for the values, in pytest's process."""

    def __init__(
        self,
        request: pytest.FixtureRequest,
        function: Callable[..., Any],
        key: Key,
        values: dict[str, Any],
        instance: object,
        names: list[str],
    ) -> None:
        self._request = request
        self._function, self._key = function, key
        self._values, self._instance, self._names = values, instance, names
        self._number = next(_numbers)
        self._placed: list[SharedRanks] = []

    def on(self, shared: SharedRanks) -> OnRank:
        """Return what is sent for the values on these ranks; set the fixture up there first if it is not yet."""
        if self._number not in shared.placed:
            from mlaunch.pytest.caller.sent_tests import split_values

            values, twins = split_values(self._values, f"rank_fixture {self._function.__name__!r}", _ON_RANKS)
            given = {name: shared.given(value) for name, value in values.items()}
            self._run(shared, self._step(values=given, twins=twins))
            shared.placed[self._number] = self
            self._placed.append(shared)
        return OnRank(self._number)

    def value_of(self, size: int) -> Any:
        """Return rank 0's value on another number of ranks."""
        shared = self._request.config.stash[POOL].of(Shape(size, "cpu", None))
        self.on(shared)
        return shared.ranks.run(rank_0s_value, self._number)[0]

    def close(self) -> None:
        """Tear it down on each set of ranks that is still there."""
        placed, self._placed = self._placed, []
        for shared in reversed(placed):
            if shared.placed.pop(self._number, None) is self and not shared.gone:
                self.end_on(shared)

    def end_on(self, shared: SharedRanks) -> None:
        """Tear it down on these ranks."""
        self._run(shared, self._step(ends=True))

    def _run(self, shared: SharedRanks, step: FixtureStep) -> None:
        from mlaunch.pytest.caller.sent_tests import facts_of

        request = self._request
        test = RankTest(
            shared.next_number(),
            request.node.nodeid,
            f"the fixture {step.name!r}",
            self._where(step),
            shared.surroundings(),
            state=None if self._instance is None else dict(vars(self._instance)),
            request=facts_of(request, (), of_test=False) if "request" in self._names and not step.ends else None,
            step=step,
        )
        shared.run_step(test)

    def _step(
        self, *, ends: bool = False, values: dict[str, Any] | None = None, twins: tuple[str, ...] = ()
    ) -> FixtureStep:
        owner = self._owner()
        # A fixture of function scope shares the test's instance; others have one of their own.
        test = self._request.node.nodeid if owner and self._request.scope == "function" else ""
        return FixtureStep(
            self._number, self._function.__name__, self._key, ends, values or {}, twins, owner=owner, test=test
        )

    def _owner(self) -> str:
        """Return the path of the class whose instance is ``self``."""
        if self._instance is None:
            return ""
        return ".".join(node.name for node in self._request.node.listchain() if isinstance(node, pytest.Class))

    def _where(self, step: FixtureStep) -> Definition:
        from mlaunch.pytest.caller.sent_tests import found_at

        config, module = self._request.config, sys.modules[self._function.__module__]
        if step.owner:  # the fixture may be in a base class from another module
            module = self._request.node.getparent(pytest.Module).obj
        return found_at(config, module, "")

    def __reduce__(self) -> Any:
        name = self._function.__name__
        raise TypeError(f"the values of rank_fixture {name!r} are on the ranks: name it among the test's arguments")

    def __repr__(self) -> str:
        return f"<rank_fixture {self._function.__name__!r}: its values are on the ranks of a test with the mark ranks>"
