"""The pytest plugin: a test marked ``ranks`` runs on ranks that stay from test to test.

``plugin.py`` is all that pytest loads; the rest is imported with the first test that has the mark. Pytest's process
(``caller/``) sets tests up and tears them down; what ``rank/run_test.py`` names runs in the ranks.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlaunch.pytest.caller.rank_fixtures import rank_fixture

__all__ = ["rank_fixture"]


def __getattr__(name: str) -> Any:
    # Late: ranks import this package without what runs in pytest's process, and the command without pytest.
    if name in __all__:
        return getattr(importlib.import_module("mlaunch.pytest.caller.rank_fixtures"), name)
    raise AttributeError(f"module 'mlaunch.pytest' has no attribute {name!r}")
