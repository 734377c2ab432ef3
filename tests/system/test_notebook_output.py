"""Where output stands in the cell of a real kernel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.test_notebooks import run

pytestmark = [pytest.mark.slow, pytest.mark.dear("a kernel of Jupyter is a fresh interpreter, and has ranks")]
EXECUTE = """
import json, sys, nbclient
from nbformat import v4
notebook = v4.new_notebook(cells=[v4.new_code_cell(source) for source in sys.argv[1:]])
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
print(json.dumps([[{"type": output["output_type"], "text": output.get("text", ""), "forms": [*output.get("data", {})]}
    for output in cell["outputs"]] for cell in notebook.cells]))
"""
PATIENT = "from mlaunch.display.caller import areas; areas._FIRST_DRAWN = 60.0"
CELL = """
from mlaunch import launcher
def train():
    print("first")
_ = launcher(train, 1, progress={progress})()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("progress", [True, False])
def test_the_place_of_the_lines_that_change(tmp_path: Path, progress: bool) -> None:
    """Above the first line, though they are not due yet. Nowhere without ``progress``."""
    _, outputs = json.loads(run(tmp_path, EXECUTE, PATIENT, CELL.format(progress=progress)))
    printed = {"type": "stream", "text": "[0] first\n", "forms": []}
    assert outputs == [{"type": "display_data", "text": "", "forms": ["text/plain"]}] * progress + [printed]


WATCHED = """
import os, pathlib, threading
from mlaunch import launcher, progress
go = pathlib.Path("{go}")
os.mkfifo(go)
def train():
    for turn in progress(range(2), "epoch 1"):
        if turn:
            go.read_text()
ours = launcher(train, 1, progress=False)
run = ours.submit()
"""
WATCHING = """
from mlaunch.display.caller.areas import DrawnLines
show, writers = DrawnLines.draw, []
def draw(display, lines, now):
    if "in read_text at In[1]:8" in lines[-1] and not writers:
        writers.append(threading.Thread(target=go.write_text, args=["x"]))
        writers[0].start()
    return show(display, lines, now)
DrawnLines.draw = draw
ours.watch()
"""


@pytest.mark.nightly
def test_a_submitted_call_is_watched_in_a_cell(tmp_path: Path) -> None:
    """In one display, which is drawn anew while the cell runs."""
    execute = EXECUTE.replace('output.get("text", "")', 'output.get("data", {}).get("text/plain", output.get("text"))')
    submitted, [shown] = json.loads(run(tmp_path, execute, WATCHED.format(go=tmp_path / "go"), WATCHING))
    assert submitted == []
    assert (shown["type"], shown["forms"]) == ("display_data", ["text/plain"])
    lines = shown["text"].splitlines()
    assert "train()  1 rank, " in lines[0]
    assert "in read_text at In[1]:8  epoch 1: 1/2" in lines[-2]
    assert lines[-1] == "train() has ended"


STUBBORN = """
import asyncio, os, pathlib, signal
from mlaunch import launcher
def train():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path("{begun}").touch()
    while True:
        signal.pause()
run = launcher(train, 1, grace_period=1, progress=False).submit()
while not os.path.exists("{begun}"):
    await asyncio.sleep(0.01)
"""
IN_A_TASK = """
async def cancel():
    return run.cancel()
print(await asyncio.create_task(cancel()), run.done())
"""


@pytest.mark.nightly
def test_a_cell_waits_for_what_it_cancels_and_a_task_of_its_loop_does_not(tmp_path: Path) -> None:
    cells = [STUBBORN.format(begun=tmp_path / "begun"), IN_A_TASK, "print(run.cancel(), run.done())"]
    found = json.loads(run(tmp_path, EXECUTE, *cells))
    assert [output["text"] for cell in found for output in cell] == ["True False\n", "True True\n"]
