"""Which functions travel by name."""

from __future__ import annotations

import inspect

import pytest

from mlaunch.protocol.calls import Reference, portable
from tests.contract import functions


@pytest.mark.parametrize(("name", "depth"), [("fit", 1), ("of_class", 2), ("static", 2)])
def test_methods_of_all_kinds_are_imported_too(name: str, depth: int) -> None:
    function = inspect.unwrap(inspect.getattr_static(functions.Model, name))
    assert portable(function) == Reference("tests.contract.functions", f"Model.{name}", depth)
