"""Draws the pictures of notebooks in the documentation: a real Jupyter server in a real browser.

``python docs/screenshots.py`` writes docs/cell.png, notebook.png, interrupt.png, timeline.png, cells.png
and debugger.png; with names of these (cell, cells, debugger), some. It needs the extra
``test`` and a Chromium (``chromium`` in PATH).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TOKEN = "screenshots"
IDLE = '.jp-Notebook-ExecutionIndicator[data-status="idle"]'
OUTPUT = ".jp-OutputArea-output"
SHOWN = """\
from mlaunch import comm, launcher, progress
import time

@launcher(n_gpus=4, device_type="cpu")
def train(steps):
    print("my rank is", comm.get_rank())
    for step in progress(range(steps), "train"):
        time.sleep(0.03 + 0.03 * (comm.get_rank() == 2))
        if step % 20 == 0:
            print("step", step)
    return 1 / steps

train(10_000)"""
CELLS = (
    "%load_ext mlaunch\n%ranks 4 --device-type cpu",
    "%%ranks\nimport torch, torch.distributed as dist\n\nrank = dist.get_rank()\n"
    "weights = torch.full((2,), 1.0 + rank)\ndist.all_reduce(weights)\nprint('the sum is', weights.tolist())\n"
    "rank ** 2",
    "shares = %ranks --pull rank",
    "%%ranks\nif rank == 2:\n    raise ValueError('no batch is left')",
)
DEBUGGED = """\
from mlaunch import comm, launcher

@launcher(n_gpus=4, device_type="cpu")
def divide(total, parts):
    mine = parts[comm.get_rank()]
    share = total / mine
    comm.synchronize()
    return share

divide.options(debug=True)(60, [1, 2, 0, 4])"""


@contextlib.contextmanager
def lab(folder: str) -> Iterator[str]:
    """A server for the notebooks of a folder, which is its home; its address."""
    shutil.copytree(ROOT / "mlaunch", Path(folder, "mlaunch"), ignore=shutil.ignore_patterns("__pycache__"))
    news = Path(folder, ".settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings")
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false"}', encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    environ |= {"PYTHONPATH": folder, "HOME": folder, "XDG_RUNTIME_DIR": folder, "IPYTHONDIR": f"{folder}/.ipython",
                "JUPYTER_CONFIG_DIR": f"{folder}/.jupyter", "JUPYTER_RUNTIME_DIR": f"{folder}/.runtime",
                "JUPYTERLAB_WORKSPACES_DIR": f"{folder}/.spaces",
                "JUPYTERLAB_SETTINGS_DIR": f"{folder}/.settings"}  # fmt: skip
    options = ["--ip=127.0.0.1", "--port=0", "--no-browser", "--allow-root", f"--ServerApp.root_dir={folder}",
               f"--IdentityProvider.token={TOKEN}", "--LabApp.check_for_updates_class=",
               "--LabApp.extension_manager=readonly"]  # fmt: skip
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *options], env=environ, stderr=subprocess.PIPE, encoding="utf-8"
    )
    assert server.stderr is not None
    try:
        for line in server.stderr:
            if found := re.search(r"(http://127\.0\.0\.1:\d+)/lab", line):
                yield found[1]
                break
        else:
            raise RuntimeError("the server ended before it served")
    finally:
        server.terminate()
        server.communicate(timeout=30)


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A page of a headless Chromium."""
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update"]  # fmt: skip
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        try:
            yield chromium.new_page(viewport={"width": 1000, "height": 1100})
        finally:
            chromium.close()


def write(folder: str, *cells: str) -> None:
    """A notebook with these cells of code, as ``shown.ipynb``."""
    made = [{"cell_type": "code", "id": f"cell{index}", "metadata": {}, "outputs": [], "execution_count": None,
             "source": source} for index, source in enumerate(cells)]  # fmt: skip
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": kernel, "cells": made}
    Path(folder, "shown.ipynb").write_text(json.dumps(notebook), encoding="utf-8")


def open_notebook(page: Any, address: str) -> None:
    page.goto(f"{address}/doc/tree/shown.ipynb?token={TOKEN}")
    wait_for_kernel(page)


def wait_for_kernel(page: Any) -> None:
    """Before that, JupyterLab would ask which one to start."""
    page.get_by_text("| Idle").wait_for(timeout=60_000)
    page.wait_for_selector(IDLE, timeout=60_000)


def run_all(page: Any) -> None:
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()


def until(page: Any, words: str) -> None:
    """Waits until an output shows some words."""
    page.locator(OUTPUT, has_text=words).first.wait_for(timeout=60_000)


def stop(page: Any) -> None:
    """Presses the stop button, and waits until the kernel is idle."""
    page.locator('[data-jp-item-name="interrupt"]').click()
    page.wait_for_selector(IDLE, timeout=60_000)


def shot(page: Any, name: str) -> None:
    page.locator(".jp-CodeCell").first.screenshot(path=HERE / f"{name}.png")


def draw_output(page: Any, folder: str, address: str) -> None:
    """What a call shows, while it runs, when it is stopped and when it is over."""
    write(folder, SHOWN)
    open_notebook(page, address)
    run_all(page)
    until(page, "step 40")
    shot(page, "notebook")
    stop(page)
    shot(page, "interrupt")
    write(folder, SHOWN.replace("train(10_000)", "losses = train(60)\ntrain.last"))
    page.reload()
    wait_for_kernel(page)
    run_all(page)
    until(page, "peak memory")
    page.wait_for_selector(IDLE, timeout=60_000)
    shot(page, "cell")
    page.locator(OUTPUT, has_text="peak memory").last.screenshot(path=HERE / "timeline.png")


def draw_cells(page: Any, folder: str, address: str) -> None:
    """Cells on ranks, of which the last one fails."""
    write(folder, *CELLS)
    open_notebook(page, address)
    run_all(page)
    until(page, "the ranks are in step and stay")
    page.wait_for_selector(IDLE, timeout=60_000)
    several(page, "cells")


def draw_debugger(page: Any, folder: str, address: str) -> None:
    """A prompt in a cell, with what was typed at it."""
    write(folder, DEBUGGED)
    open_notebook(page, address)
    run_all(page)
    for line in ("p parts", "who", "p total / max(mine, 1)"):
        box = page.locator(".jp-Stdin-input").last
        box.wait_for(timeout=60_000)
        box.fill(line)
        box.press("Enter")
        page.locator(".jp-Stdin-input").nth(1).wait_for(state="detached", timeout=60_000)  # two, for a moment
        until(page, line)
    page.locator(".jp-Stdin-input").last.wait_for(timeout=60_000)
    shot(page, "debugger")


def several(page: Any, name: str) -> None:
    """Draws all cells of a notebook, as one picture."""
    boxes = [cell.bounding_box() for cell in page.locator(".jp-CodeCell").all()]
    left, top = min(box["x"] for box in boxes), min(box["y"] for box in boxes)
    right, bottom = (max(box[at] + box[size] for box in boxes) for at, size in (("x", "width"), ("y", "height")))
    clip = {"x": left, "y": top, "width": right - left, "height": bottom - top}
    page.screenshot(path=HERE / f"{name}.png", clip=clip)


_DRAWN = {"cell": draw_output, "cells": draw_cells, "debugger": draw_debugger}


def main() -> None:
    names = sys.argv[1:] or list(_DRAWN)
    with tempfile.TemporaryDirectory() as folder, lab(folder) as address, browser() as page:
        for name in names:
            _DRAWN[name](page, folder, address)


if __name__ == "__main__":
    main()
