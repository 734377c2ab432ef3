"""No error of what shows a call costs the call anything; each is reported once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from mlaunch import Ranks, display, launcher
from mlaunch.caller.output import console, output_plan
from mlaunch.caller.output.console import Console
from mlaunch.caller.output.lines import LineSplitter, Merger, Tails, WriteTimes
from mlaunch.caller.output.output_plan import LaunchNumber
from mlaunch.display.caller import areas
from mlaunch.display.caller.areas import Area
from mlaunch.sweeps.caller import sweep

pytest.importorskip("torch", reason="its ranks need torch")


class Place(Area):
    """An area that shows nothing."""

    def show(self, text: str) -> str:  # noqa: ARG002
        return ""

    def hide(self) -> str:
        return ""

    def close(self, lines: list[str]) -> str:  # noqa: ARG002
        return ""

    def forget(self) -> None: ...


def broken(*_: Any, **__: Any) -> Any:
    raise AttributeError("a bug of ours")


def work(value: int) -> int:
    from mlaunch import progress

    for _ in progress(range(2), "epoch 1"):
        print("a line")
        print("another", file=sys.stderr)
    print("50 %\r", end="")
    return value


AREA = [(Place, name) for name in ("show", "hide", "close", "forget")]
LINES = [(LineSplitter, "feed"), (LineSplitter, "end"), (WriteTimes, "cut"), (Tails, "add"), (Tails, "of_ranks")]
WAYS = [
    (Merger, "add"),
    (Merger, "take"),
    (display.caller, "loop_line"),
    (display.caller, "status_lines"),
    (LaunchNumber, "label"),
]
FINISHING = [(Console, "finish"), (Console, "wait")]


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines change from the beginning of each call, in an area."""
    monkeypatch.setattr(areas, "_FIRST_DRAWN", 0.0)
    monkeypatch.setattr(output_plan, "live_place", lambda **_: Place())
    monkeypatch.setattr(sweep, "live_place", lambda **_: Place())


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: Callable[[], object]) -> object:
    """What the call returns while that raises."""
    with monkeypatch.context() as patched:
        console._told.clear()
        patched.setattr(owner, name, broken)
        return call()


@pytest.mark.usefixtures("everywhere")
def test_what_shows_a_call_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    reported = set()
    with Ranks(n_gpus=2, device_type="cpu") as ranks:
        for number, (owner, name) in enumerate([*AREA, *LINES, *WAYS, *FINISHING]):
            caplog.clear()
            values = [failing(monkeypatch, owner, name, lambda number=number: ranks.run(work, number))]  # type: ignore[misc]
            assert values == [[number, number]], name
            told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
            assert len(told) == len(set(told)) <= 2, told  # once for each place
            reported |= {(owner, name)} if told else set()
            assert all("AttributeError: a bug of ours" in text for text in told)
            assert ranks.run(work, number) == values[0]  # and the next call is shown as always
    assert reported >= {*WAYS, *FINISHING, (Place, "hide"), (Place, "close"), (LineSplitter, "feed")}, reported


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("name", ["show", "hide", "close"])
def test_what_shows_launches_at_the_same_time_fails(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    trials = launcher(work, n_gpus=1, device_type="cpu")
    assert failing(monkeypatch, Place, name, lambda: trials.map([1, 2]).results()) == [[1], [2]]
