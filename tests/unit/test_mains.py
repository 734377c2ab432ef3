"""Main functions of processes, run in the tests' own."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mlaunch import launcher
from mlaunch.cli import main
from mlaunch.compat import caller
from mlaunch.forkserver.imports import settle
from mlaunch.rendezvous.address import listen
from mlaunch.run import rank


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert re.fullmatch(r"mlaunch \d+\.\d+(\.\d+)?(\.?[a-z]+\d+)?\n", capsys.readouterr().out)


def test_a_server_alone_needs_its_port() -> None:
    with listen() as listener, pytest.raises(OSError, match="ddress already in use"):
        caller.main(["--port", str(listener.getsockname()[1])])


def test_two_machines_that_are_threads() -> None:
    with listen() as listener:
        port = listener.getsockname()[1]

    def machine(rank_start: int) -> list[Any]:
        options: dict[str, Any] = {"world_size": 2, "rank_start": rank_start, "master_ip": "127.0.0.1", "port": port}
        return launcher(dist.get_rank, 1, device_type="cpu", token="hush", **options)()

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(machine, (0, 1))) == [[0], [1]]


def test_memory_on_huge_pages_is_what_it_was() -> None:
    def fill() -> bool:
        kept = [bytes([number % 256]) * 1000 for number in range(10_000)]
        settle()
        return all(piece == bytes([number % 256]) * 1000 for number, piece in enumerate(kept))

    assert launcher(fill, 1)() == [True]


def test_a_script_is_main(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import json\njson.dump([__name__, __file__], open('seen.json', 'w'))")

    def run() -> None:
        os.chdir(tmp_path)
        rank._run_file("train.py")

    launcher(run, 1)()
    assert json.loads((tmp_path / "seen.json").read_text()) == ["__main__", str(path)]
