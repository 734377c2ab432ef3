"""Libraries that some tests need. What they do inside the decorator, the cookbook's tests see."""

from __future__ import annotations

import importlib.util

import pytest


def needs(*names: str) -> None:
    """Skips where a library is missing. It is not imported here: some change the environment when they are."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed (extra: integration)")
