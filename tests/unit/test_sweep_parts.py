"""The arguments of a sweep's trials, and what tells them apart."""

from __future__ import annotations

import enum
import os
import signal
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from mlaunch.display.caller.areas import SharedArea
from mlaunch.sweeps.caller import run_future, trial
from mlaunch.sweeps.caller.launch_loop import loop
from mlaunch.sweeps.caller.submitted_call import Need, Steps
from tests.processes import wait_until
from tests.unit.test_output import Place


class Size(enum.Enum):
    BIG = "big"


class Mode(enum.IntEnum):
    ON = 1


def test_labels_say_what_differs() -> None:
    grid = trial.combinations({"lr": [0.1, 1e-05], "width": [[64, 64]], "seed": range(2)})
    assert trial.labels(grid) == [
        "lr=0.1 seed=0",
        "lr=0.1 seed=1",
        "lr=1e-05 seed=0",
        "lr=1e-05 seed=1",
    ]
    assert trial.labels([{"lr": 0.1}]) == ["lr=0.1"]
    assert trial.labels([{"path": "x" * 100 + name} for name in "ab"]) == [
        "#0",
        "#1",
    ]  # no label would tell them apart
    assert trial.labels([{"model": object()}, {"model": trial.labels}]) == [
        "model=<object>",
        "model=labels",
    ]
    kinds: list[object] = [
        np.int64(3),
        np.float32(0.1),
        np.dtype("int8"),
        torch.bfloat16,
        torch.device("cpu"),
        Size.BIG,
        Mode.ON,
    ]
    kinds += [Path("data") / ("x" * 30) / "a.csv"]
    assert trial.labels([{"x": kind} for kind in kinds]) == [
        "x=3",
        "x=0.1",
        "x=int8",
        "x=torch.bfloat16",
        "x=cpu",
        "x=Size.BIG",
        "x=Mode.ON",
        "x=...xxxxxxxxxxxxxxx/a.csv",
    ]


def test_launches_that_share_a_place_leave_it_together() -> None:
    place, other = Place(), Place()
    whole = SharedArea(place, lambda: "2 in all", 0.0)
    second, first = whole.part(1).lines(9.0), whole.part(0).lines(9.0)
    stranger = other.lines(9.0)
    assert first.due == 0.5  # the first look at the whole
    for display, line in ((second, "second"), (first, "first"), (stranger, "line")):
        display.draw([line], 1.0)
    assert (place.shown, other.shown) == (["second\n2 in all", "first\nsecond\n2 in all"], [])
    first.close(["last"])
    stranger.draw(["line"], 2.0)
    assert (place.shown[-1], other.shown) == ("second\n2 in all", [])
    second.close(["last"])
    later = other.lines(9.0)
    later.draw(["line"], 3.0)
    later.close([])
    assert (place.left, other.shown) == (["2 in all"], ["line"])


class OddError(Exception):
    """As users' exceptions may be: without truth, and not to be compared."""

    __hash__ = Exception.__hash__

    def __bool__(self) -> bool:
        return False

    def __eq__(self, _other: object) -> bool:
        raise TypeError("not to be compared")


def test_local_variables_of_an_error_are_dropped_whatever_the_error_is() -> None:
    """Of its cause and of what it came beside, too; they may go in a circle."""

    def fail(kind: type[Exception]) -> None:
        held = object()  # noqa: F841 - which the frame holds
        raise kind

    def caught(kind: type[Exception]) -> Exception:
        try:
            fail(kind)
        except Exception as error:
            return error
        raise AssertionError

    first, cause, beside = caught(OddError), caught(OddError), caught(ValueError)
    first.__cause__, first.__context__, cause.__cause__ = cause, beside, first
    traces = [error.__traceback__ for error in (first, cause, beside)]
    run_future._without_locals(first)
    for trace in traces:
        assert trace is not None
        assert trace.tb_next is not None
        assert "held" not in trace.tb_next.tb_frame.f_locals


def test_a_fork_drives_its_own_submitted_calls() -> None:
    """While a thread that it does not have drives those of its parent."""
    told, going = list[object](), threading.Event()

    def steps() -> Steps:
        while not going.is_set():
            yield Need()
        return cast(Any, "over")

    loop.add(steps(), told.append)
    if (child := os.fork()) == 0:
        signal.alarm(60)
        going.set()
        ended = threading.Event()
        loop.add(steps(), lambda _: ended.set())
        os._exit(0 if ended.wait(30) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    going.set()
    loop.notify()
    wait_until(lambda: bool(told))
    assert told == ["over"]
