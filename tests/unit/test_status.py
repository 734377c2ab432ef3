"""The line that shows how far a launch is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlaunch.caller import running_launches
from mlaunch.caller.report.launch_report import History
from mlaunch.display import caller
from mlaunch.display.caller import status_lines
from mlaunch.protocol.board import Board, Loop
from mlaunch.protocol.messages import Phase


def test_the_speed_of_a_loop_is_that_of_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two of them the clock goes on, and the speed does not fall."""
    pytest.importorskip("tqdm")
    loops = [Loop(1, 2, 104.0, 10, 100.0, "train"), Loop(1, 2, 103.0, 10, 100.0, "train")]
    for now in (104.0, 106.0, 109.0):
        monkeypatch.setattr("time.monotonic", lambda now=now: now)
        assert "2.00s/it" in caller.loop_line(loops, 1, 0)
    assert "00:09<00:16" in caller.loop_line(loops, 1, 0)
    assert "?" in caller.loop_line([Loop(1, 0, 100.0, 10, 100.0, "train")], 1, 0)


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        ((Phase.STARTING, Phase.JOINING), "starting"),
        ((Phase.RUNNING, Phase.JOINING), "starting"),
        ((Phase.RUNNING, Phase.ANSWERING), "running"),
        ((Phase.RETURNED, Phase.RUNNING), "running"),
        ((Phase.IDLE, Phase.RUNNING), "running"),
    ],
)
def test_a_launch_runs_when_all_ranks_do(phases: tuple[Phase, ...], said: str) -> None:
    board = Board.create(2)
    spec = SimpleNamespace(call=SimpleNamespace(name="train()"), local_world_size=2, rank_start=0)
    outcome: Any = SimpleNamespace(spec=spec, failures=[], stopped=[])
    for local_rank, phase in enumerate(phases):
        board.phase_writer(local_rank)(phase)
    [line] = status_lines(outcome, History(board=board), "")
    assert line.split("  ")[::2] == ["train()", said]
    over = status_lines(outcome, History(board=board), "", over=True)
    assert over[0].endswith("  done")
    board.close()


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("transformers", "running, importing transformers"),
        ("torch._dynamo", "running, importing torch._dynamo, which later calls find imported"),
    ],
)
def test_imports_of_ranks_are_told(module: str, said: str) -> None:
    board = Board.create(2)
    spec = SimpleNamespace(call=SimpleNamespace(name="train()"), local_world_size=2, rank_start=0)
    outcome: Any = SimpleNamespace(spec=spec, failures=[], stopped=[])
    for local_rank in range(2):
        board.phase_writer(local_rank)(Phase.RUNNING)
    board.note_import(1, module)
    [line] = status_lines(outcome, History(board=board), "")
    assert line.endswith(f"  {said}")
    board.close()


@pytest.mark.parametrize(
    ("ranks", "world", "words"), [(1, 1, "1 rank, "), (2, 2, "2 ranks, "), (1, 3, "1 rank of 3, ")]
)
def test_how_many_ranks_a_launch_has(ranks: int, world: int, words: str) -> None:
    launch = {"id": "0" * 32, "function": "train()", "ranks": [None] * ranks, "world_size": world, "restart_count": 0}
    assert f"  train()  {words}" in running_launches.title_of({**launch, "age": 1.0, "caller": 7})
