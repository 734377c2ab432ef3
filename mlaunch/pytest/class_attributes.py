"""What pytest's process sets on a test's class, by ``setup_class`` or ``request.cls``, is there on ranks, too."""

from __future__ import annotations

from typing import Any

from mlaunch.pytest.crossing import ClassChanges
from mlaunch.pytest.travel import attribute_that_cannot

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


# On the ranks

_replaced: dict[type, _Attributes] = {}  # what classes had here before


class _Untold:
    """Stands for a value that could not travel."""

    def __init__(self, told: str) -> None:
        self._told = told

    def __get__(self, *_: object) -> Any:
        __tracebackhide__ = True
        raise TypeError(self._told)


def apply(owner: type | None, changes: ClassChanges | None) -> None:
    """Set on a class what pytest's process has set, and put back what it has removed."""
    if owner is None or changes is None:
        return
    before = _replaced.setdefault(owner, {})
    told = {name: _Untold(text) for name, text in changes.told.items()}
    for name, value in {**changes.given, **told}.items():
        before.setdefault(name, vars(owner).get(name, _NONE))
        setattr(owner, name, value)
    for name in changes.gone:
        _put_back(owner, name, before.pop(name, _NONE))


def _put_back(owner: type, name: str, value: object) -> None:
    if value is not _NONE:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)
