"""pytest-timeout's limits hold for tests on ranks, by the launcher's deadline: its report says where the ranks were."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

_PLUGIN = "pytest_timeout"


def limit_of(item: pytest.Item) -> float:
    """Returns the seconds that pytest-timeout gives a test; 0: no limit."""
    mark = item.get_closest_marker("timeout")
    given = (mark.args[0] if mark.args else mark.kwargs.get("timeout")) if mark is not None else None
    return float(getattr(item.config, "_env_timeout", None) or 0 if given is None else given)


@contextlib.contextmanager
def suspended(item: pytest.Item) -> Iterator[None]:
    """Has pytest-timeout wait while the ranks run: it would interrupt pytest's process before these have answered."""
    hooks: Any = item.ihook
    settings = getattr(sys.modules.get(_PLUGIN), "_get_item_settings", None)
    if settings is None or not hasattr(hooks, "pytest_timeout_cancel_timer"):
        yield
        return
    hooks.pytest_timeout_cancel_timer(item=item)
    try:
        yield
    finally:
        if (found := settings(item)).timeout:
            hooks.pytest_timeout_set_timer(item=item, settings=found)
