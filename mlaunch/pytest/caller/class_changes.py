"""What pytest's process sets on a test's class, by ``setup_class`` or ``request.cls``: its ranks get it, too."""

from __future__ import annotations

from typing import Any

from mlaunch.pytest.caller.fixture_transfer import attribute_that_cannot
from mlaunch.pytest.wire.rank_tests import ClassChanges

_Attributes = dict[str, Any]
_NONE: object = object()
_at_first: dict[type, _Attributes] = {}  # what classes had when pytest found their tests


def note(owner: type | None) -> None:
    """Note what a class has before any fixture was set up."""
    if owner is not None and owner not in _at_first:
        _at_first[owner] = dict(vars(owner))


class GivenAttributes:
    """What one set of ranks has of the classes of its tests."""

    def __init__(self) -> None:
        self._given: dict[type, _Attributes] = {}

    def changes(self, owner: type | None) -> ClassChanges | None:
        """Return what these ranks have not heard of yet; None if that is nothing."""
        if owner is None:
            return None
        first, now = _at_first.get(owner, vars(owner)), vars(owner)
        wanted = {name: value for name, value in now.items() if first.get(name, _NONE) is not value}
        wanted = {name: value for name, value in wanted.items() if not name.startswith(("__", "_unittest", "_xunit"))}
        given = self._given.get(owner, {})
        new = {name: value for name, value in wanted.items() if given.get(name, _NONE) is not value}
        gone = tuple(given.keys() - wanted.keys())
        if not new and not gone:
            return None
        self._given[owner] = wanted  # with the values, or another one might have the place of one that is gone
        said = {name: attribute_that_cannot(f"{owner.__name__}.{name}", value) for name, value in new.items()}
        told = {name: words for name, words in said.items() if words}
        return ClassChanges({name: value for name, value in new.items() if name not in told}, gone, told)
