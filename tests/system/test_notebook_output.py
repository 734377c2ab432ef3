"""Where output stands in the cell of a real kernel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.test_notebooks import run

pytestmark = pytest.mark.slow
EXECUTE = """
import json, sys, nbclient
from nbformat import v4
notebook = v4.new_notebook(cells=[v4.new_code_cell(source) for source in sys.argv[1:]])
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
print(json.dumps([[{"type": output["output_type"], "text": output.get("text", "")} for output in cell["outputs"]]
    for cell in notebook.cells]))
"""
PATIENT = "from mlaunch.caller.output import display; display._FIRST_LOOK_DELAY = 60.0"
CELL = """
from mlaunch import launcher
def train():
    print("first")
_ = launcher(train, 1, progress={progress})()
"""


@pytest.mark.parametrize("progress", [True, False])
def test_the_place_of_the_lines_that_change(tmp_path: Path, progress: bool) -> None:
    """Above the first line, though they are not due yet. Nowhere without ``progress``."""
    _, outputs = json.loads(run(tmp_path, EXECUTE, PATIENT, CELL.format(progress=progress)))
    printed = {"type": "stream", "text": "[0] first\n"}
    assert outputs == [{"type": "display_data", "text": ""}] * progress + [printed]
