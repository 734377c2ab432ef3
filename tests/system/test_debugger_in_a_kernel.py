"""``debug=True`` in a real kernel: the prompt is its input box, and every way out leaves the kernel as it was."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.processes import wait_gone
from tests.system.test_notebooks import run

pytestmark = pytest.mark.slow
# In a process of its own: a client of kernels keeps sockets and threads. Each cell comes with what is typed; "^C" is
# the stop button.
SESSION = """
import json, os, signal, sys, time
import zmq
from jupyter_client.manager import start_new_kernel
from tests.processes import descendants
manager, client = start_new_kernel(kernel_name="python3", env=dict(os.environ))
told, family = [], []
def run(cell, answers, allow_stdin):
    client.execute(cell, allow_stdin=allow_stdin)
    told.append([])
    iopub, stdin = client.iopub_channel.socket, client.stdin_channel.socket
    poller = zmq.Poller()
    poller.register(iopub, zmq.POLLIN)
    poller.register(stdin, zmq.POLLIN)
    while True:
        ready = dict(poller.poll(60_000))
        assert ready, told[-1]
        if stdin in ready:
            message = client.get_stdin_msg(timeout=60)
            told[-1].append([message["msg_type"], message["content"]])
            answer = answers.pop(0)
            family[:] = descendants(manager.provisioner.pid)
            if answer == "^C":
                manager.interrupt_kernel()
            elif answer == "^K":
                os.kill(manager.provisioner.pid, signal.SIGKILL)
                return
            else:
                client.input(answer)
        if iopub in ready:
            message = client.get_iopub_msg(timeout=60)
            told[-1].append([message["msg_type"], message["content"]])
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
for cell, answers, allow_stdin in json.loads(sys.argv[1]):
    run(cell, answers, allow_stdin)
print(json.dumps(told, default=str))
print(*family)
client.stop_channels()
manager.shutdown_kernel(now=True)
"""
SETUP = """
import os, signal
import torch.distributed as dist
from mlaunch import launcher
@launcher(n_gpus=2, device_type="cpu", debug=True)
def train(way):
    rank = dist.get_rank()
    if way == "fails" and rank == 1:
        raise ValueError("no such rate")
    if way == "breaks" and rank == 1:
        breakpoint()
    dist.barrier()
    return rank
"""
NEXT = ("train('goes')", [], True)


def session(tmp_path: Path, *cells: tuple[str, list[str], bool]) -> tuple[list[list[tuple[str, Any]]], list[int]]:
    """Runs cells; returns the messages of each, and who ran at the last prompt."""
    told, family = run(tmp_path, SESSION, json.dumps(cells)).splitlines()
    return json.loads(told), [int(pid) for pid in family.split()]


def prompts(messages: list[tuple[str, Any]]) -> list[str]:
    return [content["prompt"] for kind, content in messages if kind == "input_request"]


def text(messages: list[tuple[str, Any]]) -> str:
    shown = "".join(content["text"] for kind, content in messages if kind == "stream")
    return re.sub(r"\x1b\[[0-9;]*m", "", shown)


def error(messages: list[tuple[str, Any]]) -> str:
    found = next(content for kind, content in messages if kind == "error")
    return f"{found['ename']}: {found['evalue']}"


def value(messages: list[tuple[str, Any]]) -> str:
    return str(next(content["data"]["text/plain"] for kind, content in messages if kind == "execute_result"))


@pytest.mark.nightly
def test_prompts_in_a_kernel(tmp_path: Path) -> None:
    told, family = session(
        tmp_path,
        (SETUP, [], True),
        ("train('fails')", ["l", "p rank", "q"], True),
        ("train('breaks')", ["n", "c"], True),
        ("train('breaks')", ["q"], True),
        ("train('breaks')", ["^C"], True),
        ("train('breaks')", ["import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], True),
        ("train('goes')", [], False),
        NEXT,
    )
    assert prompts(told[1]) == ["(Pdb, rank 1) "] * 3
    assert "rank 1 of train() raised ValueError: no such rate" in text(told[1])
    assert re.search(r'-> +8 +raise ValueError\("no such rate"\)', text(told[1]))  # with colours, as IPython shows it
    assert "def train(way):" in text(told[1])  # the source of a cell
    assert "> In[1](8)train()" in text(told[1]), text(told[1])
    assert error(told[1]) == "ValueError: no such rate"
    assert prompts(told[2]) == ["(Pdb, rank 1) "] * 2
    assert value(told[2]) == "[0, 1]"
    assert error(told[3]).startswith("LaunchError: the run of train() was ended from the debugger")
    assert "at the prompt of rank 1 (In[1]:11 in train)" in error(told[3])
    assert error(told[4]).startswith("KeyboardInterrupt")
    assert "rank 1 of train() was killed by SIGKILL" in error(told[5])
    assert "there is nobody to ask: this notebook is run without input" in error(told[6])
    assert value(told[7]) == "[0, 1]"
    wait_gone(family)


@pytest.mark.nightly
def test_the_kernel_dies_under_a_prompt(tmp_path: Path) -> None:
    told, family = session(tmp_path, (SETUP, [], True), ("train('breaks')", ["^K"], True))
    assert re.fullmatch(r"\(Pdb, rank 1\) ", prompts(told[1])[0])
    assert len(family) >= 4
    wait_gone(family)
