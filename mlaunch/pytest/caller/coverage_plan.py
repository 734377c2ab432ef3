"""How ranks record the lines that run: as coverage.py does in pytest's process."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from mlaunch.pytest.wire.rank_tests import CoveragePlan

_OPTIONS = ("source", "source_pkgs", "branch", "omit", "include", "concurrency", "timid")


def plan(config: pytest.Config) -> CoveragePlan | None:
    """Returns how the ranks are to record, if this process does."""
    coverage: Any = sys.modules.get("coverage")
    current = coverage.Coverage.current() if coverage is not None else None
    if current is None:
        return None
    found = {name: current.get_option(f"run:{name}") for name in _OPTIONS}
    options = {
        **{name: value for name, value in found.items() if value},
        "config_file": current.config.config_file or False,
        "data_file": os.path.abspath(current.config.data_file),
        # Each process a file of its own, which pytest-cov combines; a shared one would be overwritten.
        "data_suffix": True,
        "messages": False,
    }
    return CoveragePlan(options, getattr(config.option, "cov_context", None) == "test")
