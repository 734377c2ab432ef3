"""What people read of very many ranks: reports and ``mlaunch ps`` stay as short as they are for few."""

from __future__ import annotations

from typing import Any

from mlaunch.base.exceptions import RankFailure
from mlaunch.caller.report.failure_text import FailureText, summarise
from mlaunch.cli.launch_commands import _entry
from mlaunch.insight.caller import grouped
from mlaunch.protocol.messages import Phase, RankStacks
from mlaunch.rank import rank_imports

MANY = 512


def test_consequences_that_are_alike_are_one_line() -> None:
    others = [RankFailure(rank, 1, "raised RuntimeError: closed by peer", consequence=True) for rank in range(1, MANY)]
    others.insert(3, RankFailure(None, 1, "died", subject="the process that talks to the other machines"))
    text = str(FailureText("train()", [RankFailure(0, 1, "raised ValueError: boom"), *others]))
    assert text.partition("after which:\n")[2].splitlines() == [
        "  ranks 1-511 raised RuntimeError: closed by peer",
        "  the process that talks to the other machines died",
    ]


def test_consequences_that_differ_are_counted() -> None:
    others = [RankFailure(rank, 1, f"raised KeyError: {rank}") for rank in range(1, MANY)]
    lines = str(FailureText("train()", [RankFailure(0, 1, "raised ValueError: boom"), *others])).splitlines()
    assert lines[-2:] == ["  rank 8 raised KeyError: 8", f"  and {MANY - 9} more (see .failures)"]


def test_ranks_that_are_scattered_are_a_short_line() -> None:
    [line] = summarise(RankStacks(rank, Phase.JOINING, "S", "") for rank in range(0, MANY, 2))
    assert line.startswith("ranks 0, 2, 4, ")
    assert line.endswith(f"38 and {MANY // 2 - 20} more were {Phase.JOINING.value}")


def launch(states: list[str]) -> dict[str, Any]:
    ranks = [
        {"rank": rank, "pid": 1000 + rank, "device": f"cuda:{rank}", "state": state, "frames": []}
        for rank, state in enumerate(states)
    ]
    return {"id": "0123456789", "function": "train()", "ranks": ranks, "world_size": len(states), "age": 5.0,
            "caller": 7, "restart_count": 0, "source": "train.py", "cwd": "/home/ada"}  # fmt: skip


def test_ps_shows_each_of_few_ranks_and_groups_of_many() -> None:
    assert len(_entry(launch(["running"] * 16)).splitlines()) == 19
    title, origin, head, *rows = _entry(
        launch(["running"] * 300 + ["sending its value"] + ["running"] * 211)
    ).splitlines()
    assert "512 ranks" in title
    assert origin == "  train.py in /home/ada"
    assert head.split() == ["RANK", "PID", "DEVICE", "STATE"]
    assert [" ".join(row.split()) for row in rows] == [
        "0-299, 301-511 511 pids cuda running",
        "300 1300 cuda:300 sending its value",
    ]


def test_stacks_of_scattered_ranks_are_named_in_short() -> None:
    shown = grouped(launch([("a", "b")[rank % 2] for rank in range(MANY)])["ranks"]).splitlines()
    assert len(shown) == 2
    assert max(map(len, shown)) < 150


def test_a_rank_that_imports_shows_what_the_user_has_written() -> None:
    """Less the frames of libraries and of the import system, of which each import has six; alone they are shown."""
    machinery = [("<frozen importlib._bootstrap>", str(line), "_load") for line in range(6)]
    ours = (rank_imports.__file__, "7", "find_spec")
    library, inner = (("/there/site-packages/a.py", "3", "<module>"), ("/home/me/models/__init__.py", "3", "<module>"))
    outer = ("/home/me/train.py", "9", "train")
    frames = [*machinery, ours, library, *machinery, ours, inner, *machinery, outer]
    rank = {"rank": 0, "state": "running the function", "frames": frames}
    [_, *rows] = grouped([rank]).splitlines()
    assert rows == [
        '    File "/home/me/train.py", line 9, in train',
        '    File "/home/me/models/__init__.py", line 3, in <module>',
    ]
    assert len(grouped([rank | {"frames": machinery}]).splitlines()) == 7
