"""What pytest's process has set on a test's class is set on a rank, too."""

from __future__ import annotations

from typing import Any

from mlaunch.pytest.wire.rank_tests import ClassChanges

_NONE: object = object()
_replaced: dict[type, dict[str, Any]] = {}  # what classes had here before


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
