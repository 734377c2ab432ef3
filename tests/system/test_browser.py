"""A notebook in JupyterLab, in a real browser: live output, the stop button, the next cell, and Tab."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow
# In a process of its own: a browser's driver keeps pipes and an event loop.
SCRIPT = """
import sys
sys.path.insert(0, "docs")
import screenshots as s
folder = sys.argv[1]
with s.lab(folder) as address, s.browser() as page:
    s.write(folder, s.SHOWN, "print('next cell')", "launcher(lambda: comm.get_rank(), 2)()")
    s.open_notebook(page, address)
    s.run_all(page)
    s.until(page, "step 20")
    live = page.locator(s.OUTPUT).all_inner_texts()
    s.stop(page)
    stopped = page.locator(s.OUTPUT).all_inner_texts()
    page.locator(".jp-CodeCell").nth(2).click()
    page.keyboard.press("Control+Enter")
    s.until(page, "[0, 1]")
    print(*live, sep="\\n")
    print("STOPPED", *stopped, sep="\\n")
    there = "%%ranks\\nmodel_there, model_there_too = 1, 2"
    s.write(folder, "%load_ext mlaunch", "%ranks 2 --device-type cpu", there, "model_here = 1", "%%ranks\\nmodel_")
    s.open_notebook(page, address)
    s.run_all(page)
    s.until(page, "NameError")
    page.locator(".jp-CodeCell").nth(4).locator(".cm-line").last.click()
    page.keyboard.press("End")
    page.keyboard.press("Tab")
    page.locator(".jp-Completer-item").first.wait_for(timeout=60_000)
    print("OFFERED", *page.locator(".jp-Completer-match").all_inner_texts())
"""


@pytest.mark.nightly
def test_live_output_the_stop_button_and_tab(tmp_path: Path) -> None:
    missing = [name for name in ("jupyterlab", "playwright") if importlib.util.find_spec(name) is None]
    missing += [] if shutil.which("chromium") else ["chromium"]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    shown, _, offered = done.stdout.partition("OFFERED")
    live, _, stopped = shown.partition("STOPPED")
    assert "[3] my rank is 3" in live
    assert "step 20" in live
    assert "train()  0:" in live
    assert "running" in live
    assert "train:   0%|" in live
    assert "/10000" in live
    assert "KeyboardInterrupt" in stopped
    assert "train() was interrupted; " in stopped
    assert "next cell" not in stopped  # an error ends a run of all cells
    assert offered.split() == ["model_there", "model_there_too"]
