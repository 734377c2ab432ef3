"""tqdm's bars in ranks; the lines of launches that run at the same time."""

from __future__ import annotations

import io
import itertools
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mlaunch import launcher

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("module", ["tqdm", "tqdm.auto", "tqdm.notebook"])
def test_bars_in_ranks_are_text(capsys: Capture, module: str) -> None:
    """Those for notebooks, too: a rank has no kernel. One that goes away leaves nothing."""
    pytest.importorskip("tqdm", reason="tqdm is not installed (extra: notebook)")

    def train() -> None:
        import importlib

        bars: Any = importlib.import_module(module)
        for _ in bars.tqdm(range(3), desc="gone", leave=False):
            pass
        for _ in bars.trange(3, desc="kept"):
            pass

    launcher(train, 1)()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[0] kept: 100%|")


@pytest.mark.parametrize("of_auto", [False, True])
def test_widgets_of_the_caller_are_text_in_its_forks(capsys: Capture, of_auto: bool) -> None:
    """A cell has imported them before the ranks were forked."""
    pytest.importorskip("tqdm", reason="tqdm is not installed (extra: notebook)")
    from tqdm import asyncio, notebook

    bar: Any = type("tqdm", (notebook.tqdm, asyncio.tqdm), {}) if of_auto else notebook.tqdm
    before = dict(vars(notebook.tqdm))

    def train() -> None:
        for _ in bar(range(3), desc="kept", ncols="100%", display=True):
            pass
        for _ in notebook.trange(3, desc="gone", leave=False):
            pass

    launcher(train, 1, start_method="fork")()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[0] kept: 100%|")
    assert dict(vars(notebook.tqdm)) == before


def test_bars_within_bars(capsys: Capture) -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed (extra: notebook)")

    def train() -> None:
        from tqdm import trange

        for _ in trange(3, desc="outer"):
            for _ in trange(3, desc="inner", leave=False, mininterval=0):
                pass

    launcher(train, 1)()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[0] outer: 100%|")


def test_a_bar_that_has_ended_is_shown_before_what_its_rank_printed_next(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed (extra: notebook)")
    shown = io.StringIO()
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, shown)

    def train() -> None:
        from tqdm import trange

        for epoch in range(2):
            for _ in trange(3, desc=f"epoch {epoch}"):
                pass
            print("end of", epoch)

    launcher(train, 1)()
    wanted = r"\[0\] epoch 0: 100%.*\n\[0\] end of 0\n\[0\] epoch 1: 100%.*\n\[0\] end of 1\n"
    assert re.fullmatch(wanted, shown.getvalue()), shown.getvalue()


class Shown(io.StringIO):
    """Counts what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = threading.Semaphore(0)

    def write(self, text: str) -> int:
        size = super().write(text)
        for _ in range(text.count("\n")):
            self.lines.release()
        return size


def test_launches_at_the_same_time_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their name and a number, as long as there are several."""
    shown = Shown()
    monkeypatch.setattr(sys, "stdout", shown)

    def train(begin: Path, end: Path) -> None:
        begin.read_text()
        print(begin.name)
        end.read_text()

    gates = [[tmp_path / f"{name} {number}" for name in ("begin", "end")] for number in (1, 2)]
    for gate in itertools.chain(*gates):
        os.mkfifo(gate)
    threads = [threading.Thread(target=launcher(train, 1), args=pair) for pair in gates]
    for thread in threads:
        thread.start()
    opened = [os.open(begin, os.O_WRONLY) for begin, _ in gates]  # when its rank reads it
    for fd in opened:
        os.close(fd)
    assert all(shown.lines.acquire(timeout=60) for _ in threads)
    for _, end in gates:
        end.write_text("")
    for thread in threads:
        thread.join(60)
    told = re.fullmatch(r"train#(\d) \[0\] begin (\d)\ntrain#(\d) \[0\] begin (\d)\n", shown.getvalue())
    assert told, shown.getvalue()
    assert {told[1], told[3]} == {"1", "2"}
    launcher(lambda: print("alone"), 1)()
    assert shown.getvalue().endswith("\n[0] alone\n")
