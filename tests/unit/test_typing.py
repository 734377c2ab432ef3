"""The decorator is typed with ParamSpec."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

# Of torch nothing is read, which would take most of a minute; ``mypy`` itself, as setup.cfg has it, does.
SETTINGS = """
[mypy]
strict = True
follow_imports = silent
[mypy-torch.*]
follow_imports = skip
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_typed_uses(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="a type checker reads them")
    settings = tmp_path / "mypy.ini"
    settings.write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "--config-file", settings, "--cache-dir", tmp_path]
    done = subprocess.run([*command, "-m", "tests.unit.typed"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout
