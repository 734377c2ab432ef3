"""Every way out of a prompt, of a cell and of a job, many times: what is left, and whether the next call is right.

    python -m tests.prompt_storm [runs of each] [parts]

Parts: ways (out of a prompt in a terminal), visits (the same of ``mlaunch debug``), kernels (killed, restarted and
closed under a prompt, a cell and a job), stop (the stop button; five times as many runs), pause (of ten times
``timeout`` at a prompt), cells (how long an empty one takes on four ranks), completion (of a model's attributes, in a
kernel with four ranks that are idle or busy). "right" counts runs after which nothing was
left two seconds later, and whose next call was as it should be.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mlaunch import Ranks
from tests import launches
from tests.contract.test_debugger import PROMPT, SCRIPT
from tests.imported import lend_forks
from tests.processes import alive, descendants
from tests.terminal import Terminal

_LEFT = 2.0  # seconds after which nothing may be left
_CELLS = 1000
GOES_ON = SCRIPT.replace("except LaunchError as", "except (LaunchError, KeyboardInterrupt) as")
NEXT = "next [22.0, 22.0]"
WAYS: dict[str, Callable[[Terminal, list[int]], None]] = {
    "q": lambda terminal, _: terminal.type("q"),
    "end of input": lambda terminal, _: terminal.type("\x04"),
    "detach": lambda terminal, _: terminal.type("detach"),
    "interrupt": lambda terminal, _: terminal.type("\x03"),
    "terminal closed": lambda terminal, _: terminal.close(),
    "rank killed": lambda terminal, _: kill_rank(terminal),
    "caller killed": lambda terminal, _: terminal.process.kill(),
}
ENDS = {"terminal closed", "caller killed"}  # after which the caller makes no other call
VISITS = {way: act for way, act in WAYS.items() if way not in {"q", "rank killed"}}
VISITED = """
import sys, pathlib
from mlaunch import launcher
@launcher(n_gpus=2, device_type="cpu")
def count(go):
    turns = 0
    while not go.exists():
        turns = turns + 1
    return turns > 0
print("values", count(pathlib.Path(sys.argv[1])), flush=True)
"""
COMMAND = "import runpy, sys\nsys.argv.insert(1, 'debug')\nrunpy.run_module('mlaunch', run_name='__main__')\n"
KERNEL = """
from mlaunch import launcher
%load_ext mlaunch
@launcher(n_gpus=2, device_type="cpu")
def train(way):
    if way == "breaks":
        breakpoint()
    return way
"""
UNDER = {
    "a prompt": "train.options(debug=True)('breaks')",
    "a cell": "%%ranks\nimport time\nprint('runs', flush=True)\nwhile True: time.sleep(0.01)",
    "a job": "%%ranks --bg job\nimport time\nprint('runs', flush=True)\nwhile True: time.sleep(0.01)",
}


def kill_rank(terminal: Terminal) -> None:
    terminal.type("import os; print('pid', os.getpid())")
    os.kill(int(terminal.until(PROMPT).partition("\npid ")[2].split()[0]), signal.SIGKILL)


def left(family: list[int]) -> list[int]:
    """Returns who of them still runs after the time that there is for their end."""
    end = time.monotonic() + _LEFT
    while (found := [pid for pid in family if alive(pid)]) and time.monotonic() < end:
        signal.sigtimedwait([], 0.01)
    return found


def ways(runs: int, folder: Path) -> Iterator[tuple[str, bool]]:
    for way, act in WAYS.items():
        for _ in range(runs):
            (folder / "train.py").write_text(GOES_ON)
            with closing(Terminal(folder / "train.py", "breaks")) as terminal:
                terminal.until(PROMPT)
                family = descendants(terminal.process.pid)
                act(terminal, family)
                right = way in ENDS or NEXT in terminal.until(NEXT)
                terminal.process.wait() if way in ENDS else terminal.end()
                yield way, right and not left(family)


def visits(runs: int, folder: Path) -> Iterator[tuple[str, bool]]:
    """The launch goes on, and the next visitor is served."""

    for way, act in VISITS.items():
        for _ in range(runs):
            go = folder / "go"
            go.unlink(missing_ok=True)
            (folder / "count.py").write_text(VISITED)
            with closing(Terminal(folder / "count.py", str(go))) as caller:
                family: list[int] = []
                while not (found := [one for one in launches.ask("status") if one["cwd"] == str(folder)]):
                    signal.sigtimedwait([], 0.05)
                for chosen in (act, VISITS["detach"]):
                    (folder / "visit.py").write_text(COMMAND)
                    with closing(Terminal(folder / "visit.py", found[0]["id"], "1")) as visitor:
                        visitor.until(PROMPT)
                        family = descendants(caller.process.pid)
                        chosen(visitor, family)
                        visitor.process.wait()
                go.touch()
                right = "values [True, True]" in caller.until("values [True, True]")
                caller.end()
                yield way, right and not left(family)


@contextlib.contextmanager
def closing(terminal: Terminal) -> Iterator[Terminal]:
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        terminal.close()


@contextlib.contextmanager
def kernel() -> Iterator[tuple[Any, Any]]:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    try:
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run(client: Any, source: str) -> str:
    """Runs a cell to its end; returns what it says."""
    said: list[str] = []
    client.execute_interactive(source, timeout=120, output_hook=lambda message: said.append(str(message["content"])))
    return "".join(said)


def begin(client: Any, under: str) -> None:
    """Runs a cell until it is in the midst of it."""
    client.execute(UNDER[under], allow_stdin=True)
    if under == "a prompt":
        client.get_stdin_msg(timeout=120)
        return
    while True:
        message = client.get_iopub_msg(timeout=120)
        if "runs" in str(message["content"].get("text", message["content"].get("data", ""))):
            return


def kernels(runs: int, _folder: Path) -> Iterator[tuple[str, bool]]:
    for under in UNDER:
        for how in ("restarted", "killed", "closed"):
            for _ in range(runs):
                with kernel() as (manager, client):
                    run(client, KERNEL)
                    run(client, "%ranks 2 --device-type cpu")
                    begin(client, under)
                    family = descendants(manager.provisioner.pid)
                    if how == "killed":
                        os.kill(manager.provisioner.pid, signal.SIGKILL)
                    elif how == "closed":
                        manager.shutdown_kernel()
                    else:
                        manager.restart_kernel()
                        client.wait_for_ready(timeout=120)
                    right = not left(family)
                    if how == "restarted":
                        run(client, KERNEL)
                        right = right and "['goes', 'goes']" in run(client, "train('goes')")
                    yield f"kernel {how} under {under}", right


def stop(runs: int, _folder: Path) -> Iterator[tuple[str, bool]]:
    """The prompt is back, and names are kept; says at last how long that took at most."""
    with kernel() as (manager, client):
        run(client, KERNEL)
        run(client, "%ranks 2 --device-type cpu")
        run(client, "%%ranks\nkept = 0")
        longest = 0.0
        for turn in range(5 * runs):
            asked = client.execute(UNDER["a cell"])
            while "runs" not in str(client.get_iopub_msg(timeout=120)["content"]):
                pass
            begun = time.monotonic()
            manager.interrupt_kernel()
            while not is_idle(client.get_iopub_msg(timeout=120), asked):
                pass
            longest = max(longest, time.monotonic() - begun)
            said = run(client, "%%ranks\nkept = kept + 1\nkept")
            yield "stop button", f"'{turn + 1}'" in said or f"{turn + 1}" in said
        print(f"stop button: prompt back after {longest:.2f} s at most")


def is_idle(message: Any, asked: str) -> bool:
    ours = message["parent_header"].get("msg_id") == asked
    return bool(ours and message["content"].get("execution_state") == "idle")


def pause(runs: int, folder: Path) -> Iterator[tuple[str, bool]]:
    for _ in range(runs):
        (folder / "train.py").write_text(SCRIPT)  # whose timeout is a second
        with closing(Terminal(folder / "train.py", "breaks")) as terminal:
            terminal.until(PROMPT)
            family = descendants(terminal.process.pid)
            signal.sigtimedwait([], 10.0)
            terminal.type("c")
            terminal.until("values [22.0, 22.0]")
            yield (
                "a pause of ten times timeout",
                NEXT in terminal.until(NEXT) and terminal.end() == 0 and not left(family),
            )


def cells(_runs: int, _folder: Path) -> Iterator[tuple[str, bool]]:
    with Ranks(n_gpus=4, device_type="cpu") as ranks:
        took = []
        for _ in range(_CELLS):
            begun = time.perf_counter()
            ranks.cell("")
            took.append(time.perf_counter() - begun)
    yield f"an empty cell, {late(took)}", True


def late(took: list[float]) -> str:
    """Says how long they took, but for the slowest."""
    return f"95th percentile {1000 * sorted(took)[int(0.95 * len(took))]:.1f} ms"


def completion(_runs: int, _folder: Path) -> Iterator[tuple[str, bool]]:
    """Asks as a front end does, by a message to the kernel, and waits for its answer."""
    found: list[float]
    empty: list[float]
    with kernel() as (_, client):
        run(client, KERNEL)
        run(client, "%ranks 4 --device-type cpu")
        run(client, "%%ranks\nimport time, torch, mlaunch\nmodel = torch.nn.Sequential(torch.nn.Linear(1, 1))")
        for state, right in (("idle", ["weight"]), ("busy", [])):
            if state == "busy":
                run(client, "%%ranks --bg job\nwhile not mlaunch.stopping(): time.sleep(0.01)")
            found, empty = [], []
            for _ in range(_CELLS):
                begun = time.perf_counter()
                reply = client.complete("%%ranks\nmodel[0].wei", reply=True, timeout=120)
                answered = time.perf_counter()
                client.kernel_info(reply=True, timeout=120)
                found.append(answered - begun)
                empty.append(time.perf_counter() - answered)
                yield f"completion, {state}", reply["content"]["matches"] == right
            print(f"completion, {state}: {late(found)}, a message that asks for nothing: {late(empty)}")
        run(client, "%ranks --stop job")


PARTS = {"ways": ways, "visits": visits, "kernels": kernels, "stop": stop, "pause": pause, "cells": cells}
PARTS["completion"] = completion


def main(runs: int = 20, *names: str) -> None:
    forks = contextlib.contextmanager(lend_forks)
    with tempfile.TemporaryDirectory() as folder, forks():
        for name in names or PARTS:
            for what, found in itertools.groupby(PARTS[name](runs, Path(folder)), key=lambda run: run[0]):
                rights = [right for _, right in found]
                print(f"{what}: {sum(rights)} of {len(rights)} right", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
