"""What other tests of this folder do in fresh interpreters, once in this process: so that each module is soon tried."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
from pathlib import Path

import pytest

import mlaunch
from mlaunch import launcher


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(
    ("module", "args", "status", "says"),
    [
        ("mlaunch", ["ps"], 0, ""),
        ("mlaunch.run", ["nowhere.py"], 2, "python -m mlaunch.run: nowhere.py: no such file\n"),
        ("mlaunch.launch", ["nowhere.py"], 2, "python -m mlaunch.launch: nowhere.py: no such file\n"),
    ],
)
def test_the_modules_that_are_commands(
    module: str, args: list[str], status: int, says: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", [module, *args])
    # Pytest rewrites the modules of a plugin's distribution, and its loader gives runpy no code.
    monkeypatch.setattr(
        sys, "meta_path", [finder for finder in sys.meta_path if "Rewriting" not in type(finder).__name__]
    )
    monkeypatch.delitem(sys.modules, module if module != "mlaunch" else "mlaunch.__main__", raising=False)
    # A command ends its process after the exit handlers; this process goes on.
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)
    monkeypatch.setattr(threading, "_shutdown", lambda: None)
    with pytest.raises(SystemExit) as caught:
        runpy.run_module(module, run_name="__main__")
    assert (caught.value.code, capsys.readouterr().err) == (status, says)


def test_warming_up_twice_starts_one_fork_server() -> None:
    def fork_server() -> int:
        return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])

    before = launcher(fork_server, 1)()
    mlaunch.warm_up()
    assert launcher(fork_server, 1)() == before
