"""Fixtures that are set up and torn down on the ranks of the test that asks for them."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from mlaunch.pytest.crossing import Definition

if TYPE_CHECKING:
    from mlaunch.caller.ranks.held import Held
    from mlaunch.pytest.shared_ranks import SharedRanks

F = TypeVar("F", bound=Callable[..., Any])

_numbers = itertools.count(1)
_functions: dict[tuple[str, str], Callable[..., Any]] = {}  # by module and name, in every process that imports them
_begun: dict[int, Iterator[Any]] = {}  # of this rank, by number: what is to be torn down


def rank_fixture(function: F | None = None, *, ranks: int | None = None, **options: Any) -> Any:
    """Makes a fixture that is set up on the ranks of the test, and torn down there.

    Its value is on each rank that rank's own, and never leaves it: a model, a mesh, a process group. Where ranks are
    replaced, it is set up again on the new ones.

    Args:
        ranks: Set it up on this many ranks in place of the test's; the test then gets rank 0's value, which has to
            travel. For what is saved by 4 ranks and loaded by 2.
        **options: Those of ``pytest.fixture``: scope, params, ids, name, autouse.

    Example:
        >>> @rank_fixture(scope="module")
        ... def mesh():
        ...     return init_device_mesh("cpu", (2, 2))
    """
    if function is None:
        return lambda found: rank_fixture(found, ranks=ranks, **options)
    _functions[function.__module__, function.__qualname__] = function
    return pytest.fixture(**options)(_stand_in(function, ranks))


def _stand_in(function: Callable[..., Any], size: int | None) -> Callable[..., Any]:
    """Returns the fixture that pytest sees: of the same name and arguments, and with ``request``."""
    signature = inspect.signature(function)
    names = list(signature.parameters)

    def stand_in(request: pytest.FixtureRequest, **values: Any) -> Iterator[Any]:
        wanted = {name: value for name, value in values.items() if name in names}
        param = getattr(request, "param", None)
        fixture = RankFixture(request, function, wanted, param, takes_request="request" in names)
        with contextlib.closing(fixture):
            yield fixture if size is None else fixture.value_of(size)

    ours = [inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    theirs = [parameter for parameter in signature.parameters.values() if parameter.name != "request"]
    # pytest reads the names of arguments there, to set other fixtures up before.
    stand_in.__signature__ = signature.replace(parameters=[*ours, *theirs])  # type: ignore[attr-defined]
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(stand_in, name, getattr(function, name))
    return stand_in


class RankFixture:
    """Stands for the values in pytest's process."""

    def __init__(
        self,
        request: pytest.FixtureRequest,
        function: Callable[..., Any],
        values: dict[str, Any],
        param: Any,
        *,
        takes_request: bool,
    ) -> None:
        self._request = request
        self._function = function
        self._values = values
        self._param = (param,) if takes_request else ()
        self._number = next(_numbers)
        self._placed: list[tuple[SharedRanks, Held]] = []

    def on(self, shared: SharedRanks) -> Held:
        """Returns the handle of the values on these ranks, on which it is set up if need be."""
        held = shared.fixtures.get(self._number)
        if held is None:
            given = {name: shared.given(value) for name, value in self._values.items()}
            held = shared.ranks.hold(set_up, self._number, self._where(), given, self._param)
            shared.fixtures[self._number] = held
            self._placed.append((shared, held))
        return held

    def value_of(self, size: int) -> Any:
        """Returns rank 0's value, of ranks of another number."""
        from mlaunch.pytest.mark import Shape
        from mlaunch.pytest.pool import POOL

        return self.on(self._request.config.stash[POOL].of(Shape(size, "cpu", None))).fetch(0)

    def close(self) -> None:
        """Tears it down where it was set up and ranks are still there."""
        placed, self._placed = self._placed, []
        for shared, held in reversed(placed):
            if shared.fixtures.pop(self._number, None) is held and not shared.gone:
                shared.ranks.run(tear_down, self._number)
                held.free()

    def _where(self) -> Definition:
        from mlaunch.pytest.travel import found_at

        return found_at(self._request.config, sys.modules[self._function.__module__], self._function.__qualname__)

    def __repr__(self) -> str:
        return f"<rank_fixture {self._function.__name__!r}: its values are on the ranks of a test with the mark ranks>"


# On the ranks


def set_up(number: int, where: Definition, values: dict[str, Any], param: tuple[Any, ...]) -> Any:
    """Sets a fixture up on this rank, and returns its value."""
    from mlaunch.pytest import group_names
    from mlaunch.pytest.body import import_definition

    import_definition(where)
    request = {"request": _Param(param[0])} if param else {}
    with group_names.for_fixture(number):
        made = _functions[where.module, where.qualname](**request, **values)
        if not inspect.isgenerator(made):
            return made
        _begun[number] = made
        return next(made)


def tear_down(number: int) -> None:
    """Tears a fixture down on this rank."""
    begun = _begun.pop(number, None)
    if begun is not None:
        next(begun, None)


class _Param:
    """What ``request`` is in a fixture on a rank."""

    def __init__(self, param: Any) -> None:
        self.param = param
