"""The notebook of ``examples/``, run from first to last cell in a real kernel; and a kernel that is restarted."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlaunch.caller.report.user_frames import _READ_ON
from tests.conftest import OURS, ROOT
from tests.processes import wait_gone
from tests.system.engine_rigs import MPIRUN

pytestmark = [pytest.mark.slow, pytest.mark.dear("a kernel of Jupyter is a fresh interpreter, and has ranks")]
# In processes of their own: a client of kernels keeps sockets and threads.
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
patient = "from mlaunch.caller.output import lines; lines.WINDOW = 60.0"  # on a busy machine ranks come late
notebook.cells.insert(0, nbformat.v4.new_code_cell(patient))
resources = {"metadata": {"path": sys.argv[2]}}
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
print(nbformat.writes(notebook))
"""
RESTART = """
import os, sys
from jupyter_client.manager import start_new_kernel
from tests.processes import descendants
manager, client = start_new_kernel(kernel_name="python3", env=dict(os.environ))
client.execute(sys.argv[1])
while "running" not in client.get_iopub_msg(timeout=60)["content"].get("text", ""):
    pass
print(*descendants(manager.provisioner.pid))
manager.restart_kernel(now=True)
client.wait_for_ready(timeout=60)
client.stop_channels()
manager.shutdown_kernel(now=True)
"""
CELL = """
import signal
from mlaunch import launcher
def train():
    print("running")
    signal.pause()
launcher(train, 2)()
"""


def run(tmp_path: Path, code: str, *args: str) -> str:
    if not all(map(importlib.util.find_spec, ("nbclient", "ipykernel"))):
        pytest.skip("nbclient and ipykernel are not installed (extra: test)")
    # With pytest's variable in its environment a kernel does not show what children print.
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    environ |= {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=180, check=False, env=environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def outputs(notebook: Any, source: str) -> list[Any]:
    """Of the cell whose source holds some words."""
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and source in cell.source]
    return list(cell.outputs)


def text(found: list[Any], name: str = "stdout") -> str:
    return "".join(output["text"] for output in found if output["output_type"] == "stream" and output["name"] == name)


def data(found: list[Any], kind: str) -> Iterator[str]:
    for output in found:
        if kind in output.get("data", {}):
            yield output["data"][kind]


def plain(output: Any) -> str:
    """A traceback without its colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output["traceback"]))


@pytest.mark.nightly
def test_the_tour(tmp_path: Path) -> None:
    import nbformat  # two seconds, which whoever runs other tests need not wait

    path = ROOT / "examples" / "tour.ipynb"
    assert not any(cell.get("outputs") for cell in nbformat.read(path, 4).cells)
    tour = nbformat.reads(run(tmp_path, EXECUTE, str(path), str(tmp_path)), 4)
    said = outputs(tour, "measure(10)")
    assert "[0-3] all ranks say this\n" in text(said)
    assert "[2] my part is [20.0, 20.0, 20.0]\n" in text(said)
    assert ast.literal_eval(next(data(said[-1:], "text/plain"))) == [[60.0, 60.0, 60.0]] * 4
    (picture,) = data(outputs(tour, "measure.last"), "text/html")
    assert picture.count(">rank ") >= 4
    assert "<svg" in picture
    shown = list(data(outputs(tour, "train(60)"), "text/plain"))
    assert "train: 100%" in shown[0]
    assert re.match(r"train\(\)  0:\d\d  done\n", shown[0])
    (failed,) = [output for output in outputs(tour, "fail()") if output["output_type"] == "error"]
    assert (failed["ename"], failed["evalue"].splitlines()[0]) == ("ValueError", "rank 2 has no data")
    assert "rank 2 of fail() raised ValueError: rank 2 has no data" in plain(failed)
    assert re.search(r"ranks 0-1, 3 were in barrier at In\[\d+\]:\d+\n", plain(failed) + "\n"), plain(failed)
    shown = r'Cell In\[\d+\], line 5, in fail\n +raise ValueError\("rank 2 has no data"\)\n'
    assert re.search(shown, plain(failed)), plain(failed)
    assert OURS not in plain(failed)
    assert plain(failed).endswith(_READ_ON)
    stopped = outputs(tour, "wait_for_ever()")
    assert stopped[-1]["ename"] == "KeyboardInterrupt"
    said_at_the_end = plain(stopped[-1]) + text(stopped, "stderr")
    assert said_at_the_end.count("wait_for_ever() was interrupted; rank 0 was in wait_for_ever at") == 1
    assert ast.literal_eval(next(data(outputs(tour, "measure(1)")[-1:], "text/plain"))) == [[6.0, 6.0, 6.0]] * 4
    kept, again = (next(data(outputs(tour, cell)[-1:], "text/plain")) for cell in ("ranks = Ranks", "stumble()"))
    assert kept == again
    assert len(set(ast.literal_eval(kept))) == 4
    assert "in step and stay" in str(outputs(tour, "stumble()"))
    assert "[0] 0.0\n[1] 3.0\n[2] 6.0\n[3] 9.0" in list(data(outputs(tour, "share.sum()"), "text/plain"))
    assert {line.partition("] ")[2] for line in text(outputs(tour, "%%ranks 0,2")).splitlines() if line[0] == "["} == {
        "the total is [6.0, 6.0, 6.0]"
    }
    pulled = " ".join(list(data(outputs(tour, "--pull share"), "text/plain"))[-1].split())
    assert pulled.startswith("[tensor([0., 0., 0.]), tensor([1., 1., 1.])")
    assert "there is nobody to ask: this notebook is run without input" in text(outputs(tour, "divide("))


ON_MACHINES = [
    """
from mlaunch import comm, launcher
from mlaunch.engines import Command

class Point:
    def __init__(self, x):
        self.x = x

@launcher(engine=Command({command!r}), machines=2, n_gpus=2)
def move(point):
    print("here is rank", comm.get_rank())
    return Point(point.x / (3 - comm.get_rank()))
""",
    "[point.x for point in move.options(n_gpus=1)(Point(6))]",
    "move(Point(6))  # which the last rank cannot",
]


@pytest.mark.nightly
def test_machines_from_a_notebook(tmp_path: Path) -> None:
    """Classes of cells travel there and back, what ranks print is in the cell that runs, and errors name cells."""
    if shutil.which("mpirun") is None:
        pytest.skip("openmpi-bin is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (extra: test)")
    sources = [ON_MACHINES[0].format(command=MPIRUN), *ON_MACHINES[1:]]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[-1].metadata["tags"] = ["raises-exception"]
    path = tmp_path / "machines.ipynb"
    path.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=cells)))
    made = nbformat.reads(run(tmp_path, EXECUTE, str(path), str(tmp_path)), 4)
    found = outputs(made, "point.x for")
    assert list(data(found[-1:], "text/plain")) == ["[2.0, 3.0]"]
    assert sorted(text(found).splitlines()) == ["[0] here is rank 0", "[1] here is rank 1"]
    (error,) = [one for one in outputs(made, "which the last") if one["output_type"] == "error"]
    assert error["ename"] == "ZeroDivisionError"
    assert "rank 3 of move() raised ZeroDivisionError: division by zero" in plain(error)
    assert re.search(r"Cell In\[2\], line \d+, in move\n", plain(error)), plain(error)


def test_a_kernel_that_is_restarted_leaves_nothing(tmp_path: Path) -> None:
    family = [int(pid) for pid in run(tmp_path, RESTART, CELL).split()]
    assert len(family) >= 4
    wait_gone(family)
