"""What the fork servers of tests import: most of the tests' modules need it, and each rank would import it again."""

from __future__ import annotations

import contextlib

import pytest  # noqa: F401

from mlaunch import launcher  # noqa: F401
from tests import launches  # noqa: F401

with contextlib.suppress(ImportError):  # a feature may have been taken out: test_without_features.py
    from mlaunch import Ranks, Sweep  # noqa: F401
