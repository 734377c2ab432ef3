"""The table of what ranks do: its rows, from one look to the next, and where its figures come from."""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mlaunch.base.text import columns
from mlaunch.caller.call_log import CallLog
from mlaunch.cli import launch_commands, main
from mlaunch.display import caller as drawing
from mlaunch.insight.caller import watching
from mlaunch.insight.caller.watching import DeviceUse, RankTable

FRAMES = [["/usr/lib/python3/dist-packages/torch/distributed/c.py", "9", "all_reduce"], ["/me/train.py", "21", "step"]]


def seen(age: float, cpu: float, done: int, seconds: float, **changes: Any) -> dict[str, Any]:
    loop = {"number": 1, "done": done, "total": 100, "seconds": seconds, "still": 0.1, "description": "epoch 1"}
    rank = {"rank": 0, "device": "cuda:1", "state": "running the function", "frames": FRAMES, "loop": loop, "cpu": cpu}
    ranks = [{**rank, "memory": 3 << 20, **changes}]
    return {"id": "3f2a6c11aaaa", "function": "train()", "world_size": 1, "restart_count": 0, "age": age, "caller": 7,
            "ranks": ranks}  # fmt: skip


def looked_at(device: str) -> tuple[int, int, int | None] | None:
    return (1 << 30, 8 << 30, 87) if device.startswith("cuda") else None


def test_two_looks() -> None:
    table = RankTable(looked_at, "here")
    title, head, row = table.lines([seen(10.0, 5.0, 4, 8.0)])
    assert title == "3f2a6c11  train()  1 rank, 10 s old, called by pid 7"
    assert head.split("  ")[1:3] == ["rank", "device"]
    where, use = "running the function in all_reduce at train.py:21", "3.0 MiB 1.0 GiB of 8.0 GiB 87%"
    assert " ".join(row.split()) == f"0 cuda:1 {where} epoch 1: 4/100 2.0 s each {use}"
    _, head, row = table.lines([seen(12.0, 7.5, 24, 10.0)])
    assert " ".join(row.split()).endswith(f" 24/100 10.0/s 125% {use}")
    assert len(row) == len(head)
    _, _, row = table.lines([seen(13.0, 7.5, 24, 10.0)])
    assert " 10.0/s  " in row  # as it was when it last made a turn


def test_a_loop_that_stands_still() -> None:
    table = RankTable(looked_at, "here")
    launch = seen(100.0, 5.0, 4, 8.0)
    launch["ranks"][0]["loop"]["still"] = 41.0
    assert "  none for 41 s  " in table.lines([launch])[2]
    launch["ranks"][0]["loop"] |= {"done": 100}
    assert "none for" not in table.lines([launch])[2]  # it is through


def test_texts_of_ranks_are_shown_and_measured() -> None:
    """They neither command the terminal, nor tear the table."""
    table, wide = RankTable(looked_at, "here"), "\u65e5\u672c"
    launch = seen(1.0, 0.0, 1, 1.0) | {"function": "train\u202e()"}
    other = seen(1.0, 0.0, 1, 1.0)["ranks"][0] | {"rank": 1}
    launch["ranks"][0]["loop"]["description"] = "\x1b]0;x\x07a\nb"
    other["loop"] = other["loop"] | {"description": wide}
    launch["ranks"].append(other)
    title, head, first, second = table.lines([launch])
    assert title.startswith(r"3f2a6c11  train\u202e()  ")
    assert r"\x1b]0;x\x07a\nb: 1/100" in first
    assert len(first) == columns(second) == len(second) + 2 == len(head)


def test_no_table_over_what_another_program_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = SimpleNamespace(isatty=lambda: True)
    for name, fd, call, error in (
        ("stderr", 1, lambda: watching.watch_calls("train", CallLog()), RuntimeError),
        ("stdout", 2, lambda: watching.watch_all(1.0, str, list), OSError),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(sys, name, terminal)
            patch.setattr(drawing, "is_piped", fd.__eq__)
            with pytest.raises(error, match="and so may the program that reads"):
                call()
    assert capsys.readouterr().out == ""


def test_unknown_columns_take_no_room() -> None:
    """A rank of a machine that has not answered, one elsewhere, and one that is not in its function."""
    table = RankTable(looked_at, "here")
    lost = {"rank": 0, "pid": 0, "device": "-", "state": "its machine is lost", "host": "there"}
    _, head, row = table.lines([{**seen(1.0, 0.0, 0, 0.0), "ranks": [lost]}])
    assert head.split() == ["rank", "device", "state"]
    assert " ".join(row.split()) == "0 - on there its machine is lost"
    _, head, _ = table.lines([seen(1.0, 0.0, 4, 8.0, host="there", state="waiting for a call", loop={}, memory=0)])
    assert head.split() == ["rank", "device", "state"]
    assert table.lines([]) == []


class NotTold(Exception):
    """As the package raises."""


class Driver:
    """Stands in for the package that asks NVIDIA's library, which a machine without a GPU lacks."""

    NVMLError = NotTold

    def __init__(self, status: int = 0) -> None:
        self.status, self.asked = status, list[object]()

    def nvmlInit(self) -> None:
        if self.status:
            raise NotTold(self.status)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        self.asked.append(index)
        if index >= 2:
            raise NotTold(2)
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> object:
        self.asked.append(name)
        return name

    def nvmlDeviceGetMemoryInfo(self, _handle: object) -> SimpleNamespace:
        return SimpleNamespace(total=80, used=30)

    def nvmlDeviceGetUtilizationRates(self, handle: object) -> SimpleNamespace:
        if handle == "MIG-1":  # which does not support it
            raise NotTold(3)
        return SimpleNamespace(gpu=87)


def test_figures_of_a_device() -> None:
    driver = Driver()
    use = DeviceUse(lambda _name: driver)
    assert use.of("cpu") is None
    assert use.of("cuda:1") == (30, 80, 87)
    assert use.of("cuda:MIG-1") == (30, 80, None)
    assert use.of("cuda:2") is None
    assert driver.asked == [1, "MIG-1", 2]


def test_a_machine_without_a_driver() -> None:
    def load(_name: str) -> object:
        raise ImportError("no such package")

    assert DeviceUse(load).of("cuda:0") is None
    assert DeviceUse(lambda _name: Driver(9)).of("cuda:0") is None


def test_the_package_itself_has_what_is_asked() -> None:
    nvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed (extra: nvidia)")
    asked = [name for name in dir(Driver) if name.startswith("nvml")]
    assert all(callable(getattr(nvml, name)) for name in asked)
    assert issubclass(nvml.NVMLError, Exception)


def test_a_table_needs_a_terminal_and_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--watch"]) == 1
    said = capsys.readouterr().err
    assert said == "mlaunch: ps --watch needs a terminal, and stdout is not one; a program can read mlaunch ps --json\n"
    with pytest.raises(SystemExit, match="2"):
        main(["ps", "--watch", "--json"])
    assert "--json: not allowed with argument --watch" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match=r"train\.watch\(\) needs a notebook, or a terminal as stderr; train\.why"):
        watching.watch_calls("train", CallLog())
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    assert main(["ps", "--watch"]) == 1
    said = capsys.readouterr().err
    assert said == (
        "mlaunch: mlaunch ps --watch draws on a terminal with rich, which is not installed: pip install "
        "'mlaunch[watch]'\n"
    )


@pytest.mark.parametrize("text", ["0", "-1", "often", "nan", "inf"])
def test_how_often(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text}: allowed: seconds, more than 0"):
        launch_commands._period(text)
    assert launch_commands._period("0.5") == 0.5


def test_calls_are_counted() -> None:
    log = CallLog()
    assert log.wait_over(60.0)
    log.begin()
    assert not log.wait_over(0.0)
    assert log.running == 1
    log.end()
    assert log.wait_over(60.0)
