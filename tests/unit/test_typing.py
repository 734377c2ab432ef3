"""The decorator is typed with ParamSpec."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_typed_uses() -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "setup.cfg"]
    done = subprocess.run(
        [*command, "-p", "mlaunch", "-m", "tests.unit.typed"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout
