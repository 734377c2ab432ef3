"""``debug=True``: prompts of pdb in ranks, at a real terminal, and every way out of them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mlaunch import launcher
from tests import launches
from tests.processes import descendants, wait_gone
from tests.terminal import Terminal

SCRIPT = """
import os, sys, threading
import torch
import torch.distributed as dist
from mlaunch import LaunchError, launcher

def total_of(value):
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item()

@launcher(n_gpus=2, device_type="cpu", debug=True, timeout=1)
def train(way, lr):
    rank = dist.get_rank()
    scale = 10 * (rank + lr)
    if way == "fails" and rank == 1:
        raise ValueError(f"no such rate: {lr}")
    if way == "fails in a library" and rank == 1:
        torch.ones(2) @ torch.ones(3)
    if way == "breaks" and rank == 1 or way == "all break":
        breakpoint()
    scale = scale + 1
    if way == "asks":
        return input("how many? ") if rank == 1 else ""
    if way == "in a thread" and rank == 0:
        thread = threading.Thread(target=lambda: helper(scale), name="helper")
        thread.start()
        thread.join()
    if way == "in a worker" and rank == 1:
        list(torch.utils.data.DataLoader([0.0, 1.0], num_workers=1, collate_fn=lambda batch: breakpoint()))
    if way == "in a child" and rank == 1:
        if (child := os.fork()) == 0:
            try:
                breakpoint()
            except RuntimeError as error:
                print(error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    return total_of(scale)

def helper(number):
    breakpoint()
    return number

try:
    print("values", train(sys.argv[1], 0.5))
except LaunchError as error:
    print("LaunchError:", error)
except ValueError as error:
    print("ValueError:", error)
print("next", train("goes", 0.5))
"""
PROMPT = "(Pdb, rank 1) "


@pytest.fixture
def terminal(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    """One with the script, which does what the test's parameter says."""
    (tmp_path / "train.py").write_text(SCRIPT)
    found = Terminal(tmp_path / "train.py", request.param)
    yield found
    found.process.kill()
    found.process.wait()
    found.close()


def doing(way: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("terminal", [way], indirect=True)


@pytest.mark.parametrize("start_method", ["forkserver", "fork", "spawn"])
def test_the_lines_may_come_from_a_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], start_method: str
) -> None:
    def train() -> float:
        scale = 10.0 * (dist.get_rank() + 1)
        if dist.get_rank() == 1:
            breakpoint()
        total = torch.tensor(scale)
        dist.all_reduce(total)
        return float(total)

    asked: list[str] = []
    answers = iter(["p scale", "scale = 5.0", "n", "c"])

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return next(answers)

    monkeypatch.setenv("TERM", "dumb")
    launches.ask_anywhere(monkeypatch)
    monkeypatch.setattr("builtins.input", answer)
    assert launcher(train, 2, device_type="cpu", debug=True, start_method=start_method)() == [15.0, 15.0]
    assert asked == [PROMPT] * 4
    shown = capsys.readouterr().out
    assert "-> total = torch.tensor(scale)\n" in shown  # from Python 3.13 on it stops a line earlier
    assert "\n20.0\n" in shown


@doing("fails")
def test_a_prompt_where_a_rank_fails(terminal: Terminal) -> None:
    """In the user's frame, with its source, and without the launcher's frames; then the failure goes its way."""
    shown = terminal.until(PROMPT)
    assert "rank 1 of train() raised ValueError: no such rate: 0.5" in shown
    assert "train.py(18)train()\n-> raise ValueError" in shown
    terminal.type("p scale, lr")
    assert "(15.0, 0.5)" in terminal.until(PROMPT)
    terminal.type("w")
    frames = [line for line in terminal.until(PROMPT).splitlines() if "(" in line and ".py(" in line]
    assert len(frames) == 1, frames
    terminal.type("n")
    assert "cannot continue; look around, q ends the launch" in terminal.until(PROMPT)
    terminal.type("q")
    terminal.until("ValueError: no such rate: 0.5")
    terminal.until("next [22.0, 22.0]")
    assert terminal.end() == 0


@doing("fails in a library")
def test_the_prompt_is_in_the_users_frame(terminal: Terminal) -> None:
    assert "train.py(20)train()\n-> torch.ones(2) @ torch.ones(3)" in terminal.until(PROMPT)
    terminal.type("c")
    assert terminal.end() == 1
    assert "rank 1 of train() raised RuntimeError" in terminal.seen


@doing("breaks")
def test_a_breakpoint(terminal: Terminal) -> None:
    """It stops at the next line, shows and changes variables, steps; the others wait, whatever ``timeout`` says."""
    assert "-> scale = scale + 1" in terminal.until(PROMPT)
    terminal.type("scale = 100.0")
    terminal.until(PROMPT)
    terminal.type("n")
    assert '-> if way == "asks":' in terminal.until(PROMPT)
    terminal.type("l")
    assert "thread.start()" in terminal.until(PROMPT)
    terminal.type("c")
    terminal.until("values [107.0, 107.0]")
    terminal.until("next [22.0, 22.0]")
    assert terminal.end() == 0


@doing("all break")
def test_several_wait_for_their_turn(terminal: Terminal) -> None:
    first = terminal.until("(Pdb, rank ") + terminal.until(") ")
    rank = int(first.rpartition("rank ")[2][0])
    terminal.type("c")
    terminal.until(f"(Pdb, rank {1 - rank}) ")
    terminal.type("c")
    terminal.until("values [")
    assert terminal.end() == 0


@doing("all break")
def test_words_for_several_ranks(terminal: Terminal) -> None:
    here(terminal, "train.py:23", "train.py:23")
    seen, rank = tell(terminal, "all p scale")
    assert re.search(r"^\[0\] 5.0\n(.*\n)?(.*\n)?\[1\] 15.0$", seen, re.MULTILINE), (
        seen
    )  # where each is, the first time
    terminal.type("all n")
    rank = here(terminal, "train.py:24", "train.py:24")
    tell(terminal, f"ranks {1 - rank} scale = 1.0")
    assert tell(terminal, f"switch {1 - rank}")[1] == 1 - rank
    assert "1.0" in tell(terminal, "p scale")[0]
    assert "rank 7 of train(): not at a prompt" in tell(terminal, "ranks 0,7 n")[0]
    terminal.type("all c")
    total = (7.0, 17.0)[rank]
    terminal.until(f"values [{total}, {total}]")
    assert terminal.end() == 0


def tell(terminal: Terminal, line: str = "") -> tuple[str, int]:
    """Types a line; returns what is shown until the next prompt, and whose that is."""
    if line:
        terminal.type(line)
    seen = terminal.until("(Pdb, rank ")
    return seen, int(terminal.until(") ")[0])


def here(terminal: Terminal, *places: str) -> int:
    """Waits until all ranks have stopped, each at its place; returns whose the prompt is then."""
    seen, rank = tell(terminal)
    while not all(f"rank {number} has stopped at {place} " in seen for number, place in enumerate(places)):
        seen, rank = tell(terminal, "who")
    return rank


@doing("breaks")
def test_the_word_who_says_where_ranks_are(terminal: Terminal) -> None:
    seen = terminal.until(PROMPT)
    while "all_reduce" not in seen:
        terminal.type("who")
        seen = terminal.until(PROMPT)
    assert re.search(r"rank 0 .*all_reduce.*\nrank 1 has stopped at train.py:\d+ in train\n", seen)
    terminal.type("q")
    assert terminal.end() == 0


@doing("asks")
def test_input_in_a_rank(terminal: Terminal) -> None:
    terminal.until("[1] how many? ")
    terminal.type("three")
    terminal.until("values ['', 'three']")
    assert terminal.end() == 0


@doing("in a thread")
def test_a_breakpoint_in_a_thread(terminal: Terminal) -> None:
    terminal.until("(Pdb, rank 0, thread helper) ")
    terminal.type("p number")
    assert "6.0" in terminal.until("(Pdb, rank 0, thread helper) ")
    terminal.type("c")
    terminal.until("values [22.0, 22.0]")
    assert terminal.end() == 0


@doing("in a child")
def test_a_breakpoint_in_a_child_of_a_rank(terminal: Terminal) -> None:
    terminal.until(
        "a child of rank 1 of train(): only the rank itself has a prompt. If this is a worker of a DataLoader"
    )
    terminal.until("values [22.0, 22.0]")
    assert terminal.end() == 0


@doing("in a worker")
def test_a_breakpoint_in_a_worker_of_a_data_loader(terminal: Terminal) -> None:
    """It is an error, which the rank raises: there is a prompt for that one."""
    assert "rank 1 of train() raised RuntimeError: Caught RuntimeError in DataLoader worker" in terminal.until(PROMPT)
    terminal.type("q")
    terminal.until("num_workers=0 runs its code in the rank")
    assert terminal.end() == 1


@pytest.mark.parametrize("leave", ["q", "\x04"])
@doing("breaks")
def test_q_and_the_end_of_input_end_the_launch(terminal: Terminal, leave: str) -> None:
    terminal.until(PROMPT)
    terminal.type(leave)
    shown = terminal.until("next [22.0, 22.0]")
    assert "LaunchError: the run of train() was ended from the debugger" in shown
    assert "BdbQuit" not in shown
    assert terminal.end() == 0


@doing("all break")
def test_detach(terminal: Terminal) -> None:
    """A rank goes on by itself; the others' prompts stay."""
    first = terminal.until("(Pdb, rank ") + terminal.until(") ")
    terminal.type("detach")
    terminal.until(f"(Pdb, rank {1 - int(first.rpartition('rank ')[2][0])}) ")
    terminal.type("detach")
    terminal.until("values [22.0, 22.0]")
    assert terminal.end() == 0


@doing("breaks")
def test_an_interrupt_at_the_prompt(terminal: Terminal) -> None:
    terminal.until(PROMPT)
    family = descendants(terminal.process.pid)
    terminal.type("\x03")
    assert terminal.end() == -signal.SIGINT
    assert "KeyboardInterrupt" in terminal.seen
    wait_gone(family)


@doing("breaks")
def test_the_terminal_is_closed(terminal: Terminal) -> None:
    terminal.until(PROMPT)
    family = descendants(terminal.process.pid)
    terminal.close()
    terminal.process.wait()
    wait_gone(family)


@doing("breaks")
def test_the_caller_is_killed(terminal: Terminal) -> None:
    terminal.until(PROMPT)
    family = descendants(terminal.process.pid)
    terminal.process.kill()
    wait_gone(family)


@doing("breaks")
def test_the_rank_is_killed(terminal: Terminal) -> None:
    """The prompt is withdrawn; the failure is told, and the next call is right."""
    terminal.until(PROMPT)
    terminal.type("import os; print('pid', os.getpid())")
    pid = int(terminal.until(PROMPT).partition("\npid ")[2].split()[0])
    os.kill(pid, signal.SIGKILL)
    assert "LaunchError: rank 1 of train() was killed by SIGKILL" in terminal.until("next [22.0, 22.0]")
    assert terminal.end() == 0
