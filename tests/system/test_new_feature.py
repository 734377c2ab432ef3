"""The feature that ``docs/features.rst`` adds: its files and its line are all that it takes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SCRIPT = """
import subprocess, sys
import mlaunch

def ps(*flags):
    print(subprocess.check_output([sys.executable, "-m", "mlaunch", "ps", *flags], text=True), end="")

if __name__ == "__main__":
    with mlaunch.Ranks(n_gpus=1, device_type="cpu") as ranks:
        for number in range(3):
            ranks.run(abs, -number)
        ps()
        ps("--json")
    print(mlaunch.launcher(abs, 1, device_type="cpu")(-5))
"""


@pytest.mark.slow
@pytest.mark.fresh
def test_a_new_feature_is_a_folder_and_a_line(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="it starts ranks")
    shutil.copytree(ROOT / "mlaunch", tmp_path / "mlaunch")  # compiled, so that its processes need not do it again
    shutil.copytree(ROOT / "docs" / "listings" / "counting", tmp_path / "mlaunch" / "counting")
    page = (ROOT / "docs" / "features.rst").read_text()
    (line,) = re.findall(r'^    (Feature\("counting", .*,)$', page, re.MULTILINE)
    features = tmp_path / "mlaunch" / "features.py"
    before, head, after = features.read_text().partition("FEATURES = (\n")
    features.write_text(f"{before}{head}    {line}\n{after}")
    (tmp_path / "script.py").write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    (tmp_path / "run").mkdir(mode=0o700)
    environ |= {"PYTHONPATH": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    text, _, data = done.stdout.partition("[\n")
    assert "\n  counting: calls 3\n" in text
    launches, end = json.JSONDecoder().raw_decode(f"[\n{data}")
    assert [launch["features"] for launch in launches] == [{"counting": {"calls": 3}}]
    assert f"[\n{data}"[end:].strip() == "[5]"
