"""``%ranks`` and ``%%ranks`` in a real kernel: what it sends to a front end, its stop button, and its death."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.processes import wait_gone
from tests.system.test_notebooks import run

pytestmark = [pytest.mark.slow, pytest.mark.dear("a kernel of Jupyter is a fresh interpreter, and has ranks")]
LOAD = "%load_ext mlaunch\n%ranks 2 --device-type cpu"
# In a process of its own: a client of kernels keeps sockets and threads.
SESSION = """
import json, os, signal, sys
from jupyter_client.manager import start_new_kernel
from tests.processes import descendants
manager, client = start_new_kernel(kernel_name="python3", env=dict(os.environ))
told = []
for cell in json.loads(sys.argv[1]):
    told.append([])
    if cell.endswith("|"):  # a cursor, at which somebody asks for completion
        reply = client.complete(cell[:-1], len(cell) - 1, reply=True, timeout=60)
        told[-1].append([reply["msg_type"], reply["content"]])
        continue
    asked = client.execute(cell)
    while True:
        message = client.get_iopub_msg(timeout=60)
        told[-1].append([message["msg_type"], message["content"]])
        if "running" in message["content"].get("text", ""):
            manager.interrupt_kernel()
        is_idle = message["content"].get("execution_state") == "idle"
        if is_idle and message["parent_header"].get("msg_id") == asked:
            break
while "--bg job" in sys.argv[1] and "job: done" not in str(told):  # a job's end is told by another thread
    message = client.get_iopub_msg(timeout=60)
    told[-1].append([message["msg_type"], message["content"]])
print(json.dumps(told, default=str))
print(*descendants(manager.provisioner.pid))
os.kill(manager.provisioner.pid, signal.SIGKILL)
client.stop_channels()
manager.shutdown_kernel(now=True)
"""


def session(tmp_path: Path, *cells: str) -> tuple[list[list[tuple[str, Any]]], list[int]]:
    """Runs cells, interrupting one that says "running"; returns the messages of each, and who was left to the kernel.

    Where a cell ends with |, it asks for completion. Then the kernel is killed.
    """
    told, family = run(tmp_path, SESSION, json.dumps(cells)).splitlines()
    return json.loads(told), [int(pid) for pid in family.split()]


def of(messages: list[tuple[str, Any]], kind: str) -> list[Any]:
    return [content for name, content in messages if name == kind]


def plain(error: Any) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error["traceback"]))


def test_cells_in_a_kernel(tmp_path: Path) -> None:
    told, family = session(
        tmp_path,
        LOAD,
        "%%ranks\nfrom mlaunch import comm\nfrom IPython.display import HTML\nrank = comm.get_rank()\nHTML('<b>1</b>')",
        "%%ranks\nimport matplotlib.pyplot as plt\nplt.plot([1, 2])\nrank",
        "%%ranks\nx = 3; comm.synchronize()\nif rank == 1:\n    raise ValueError('no')",
        "%%ranks\nimport time\nprint('running')\nwhile True:\n    time.sleep(0.01)",
        "%%ranks\nx",
        "%%ranks --bg job\nprint('hello')\nx",
        "job.result()",
    )
    assert of(told[1], "execute_result")[0]["data"]["text/html"] == "<b>1</b>"
    assert of(told[2], "execute_result")[0]["data"]["text/plain"] == "[0] 0\n[1] 1"
    figures = [shown for shown in of(told[2], "display_data") if "image/png" in shown["data"]]
    assert len(figures) == 1, told[2]  # of rank 0
    (failed,) = of(told[3], "error")
    assert (failed["ename"], failed["evalue"]) == ("ValueError", "no")
    assert "rank 1 of cell In[4] raised ValueError: no" in plain(failed)
    assert re.search(r"Cell In\[4\], line 4, in <module>\n +raise ValueError\('no'\)", plain(failed)), plain(failed)
    assert "site-packages" not in plain(failed)
    (stopped,) = of(told[4], "error")
    assert stopped["ename"] == "KeyboardInterrupt"
    assert "in <module> at In[5]:5" in plain(stopped)
    assert "in step and stay" in plain(stopped)
    assert of(told[5], "execute_result")[0]["data"]["text/plain"] == "3"
    assert of(told[7], "execute_result")[0]["data"]["text/plain"] == "3"
    (begun,) = of(told[6], "display_data")
    updates = [shown for messages in told for shown in of(messages, "update_display_data")]
    last = [shown for shown in updates if shown["transient"] == begun["transient"]][-1]
    assert re.fullmatch(r"job: done after .*\n\[0-1\] hello\n3", last["data"]["text/plain"]), last
    assert len(family) >= 4
    wait_gone(family)


@pytest.mark.nightly
def test_completion_in_a_kernel(tmp_path: Path) -> None:
    go = str(tmp_path / "go")
    told, _ = session(
        tmp_path,
        LOAD,
        "%%ranks\nimport os, torch\nfrom mlaunch import comm\nmodel_there = torch.nn.Sequential(torch.nn.Linear(1, 1))",
        "model_here = 1",
        "%%ranks\nx = 1\nmodel_|",
        "%%ranks\nmodel_there[0].wei|",
        "%ranks --pu|",
        "model_|",
        f"%%ranks --bg job\nwhile comm.get_rank() and not os.path.exists({go!r}): os.sched_yield()\ncomm.synchronize()",
        "%%ranks\nmodel_|",
        f"open({go!r}, 'w'); job.result()",
        "%%ranks\ncomm.synchronize(); model_there[0].weight.shape",
        "%%ranks\nmodel_|",
    )
    found = [content["matches"] for messages in told for content in of(messages, "complete_reply")]
    there = ["model_there"]
    assert found == [there, ["weight"], ["--pull", "--push"], ["model_here"], [], there], found
    assert of(told[10], "execute_result")[0]["data"]["text/plain"] == "torch.Size([1, 1])"
