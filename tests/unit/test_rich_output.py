"""What ranks display, on its way to a notebook: lines, their limit and order, and IPython's functions in a rank."""

from __future__ import annotations

import builtins
import dataclasses
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from mlaunch.caller.output.output_plan import Policy
from mlaunch.display import caller, rank, wire
from mlaunch.display.wire import STREAM, LineCutter
from mlaunch.protocol.board import Board
from tests.unit.test_output import Pipes, plan

IPython = pytest.importorskip("IPython")


def line(number: int) -> bytes:
    found = wire.line_of({"data": {"text/html": number}})
    assert found is not None
    return found


def test_lines_are_cut_and_one_that_was_interrupted_spoils_no_other() -> None:
    cutter, whole = LineCutter(), line(1)
    assert cutter.feed(whole[:9], 0.0) == []
    found = cutter.feed(whole[9:] + whole[:20] + whole, 0.0)
    assert [line for _, line in found] == [whole.strip(), whole[:20].strip(), whole.strip()]
    content = wire.read(whole.strip())
    assert content is not None
    assert content[1] == {"data": {"text/html": 1}}
    assert wire.read(whole[:20].strip()) is None
    assert caller.publish(whole[:20].strip()) == ""


def test_more_than_the_limit_is_neither_sent_nor_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LIMIT", 100)
    assert wire.line_of({"data": {"text/html": "x" * 100}}) is None
    cutter = LineCutter()
    for _ in range(10):
        cutter.feed(b"x" * 60, 0.0)
    assert len(cutter._rest) <= 100


class Publisher:
    """A notebook's, which writes into what it is given."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def publish(self, data: dict[str, Any], metadata: Any = None, **options: Any) -> None:
        if data.get("text/html") == "broken":
            raise RuntimeError("no frontend")
        print(f"shown {data}", flush=True)
        self.told.append((data, metadata, options))

    def clear_output(self, *, wait: bool) -> None:
        self.told.append(wait)


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Publisher:
    made = Publisher()
    monkeypatch.setattr(IPython, "get_ipython", lambda: types.SimpleNamespace(display_pub=made, kernel=1))
    return made


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create(2)
    yield made
    made.close()


@pytest.mark.parametrize("size", [1, 2])
def test_a_display_stands_between_the_lines(
    size: int, board: Board, publisher: Publisher, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Although all is read at once; in a second call of ranks that stay, too."""
    wanted = plan(size, Policy())
    wanted = dataclasses.replace(
        wanted, policies={**wanted.policies, (0, STREAM): Policy()}, remember=True, rich=caller
    )
    pipes = Pipes(wanted, size, board=board)
    file = pipes.file(0, 1, board)
    for _ in range(2):
        file.write(b"before\n")
        pipes.write(0, STREAM, line(1))
        file.write(b"after\n")
        pipes.relay.finish(stays=True)
        shown = capfdbinary.readouterr().out
        assert shown == b"[0] before\nshown {'text/html': 1}\n[0] after\n"
        assert pipes.relay.output.tails() == {0: b"before\nafter\n"}
        pipes.relay.turn_to(dataclasses.replace(wanted, name="again"), size, board)
    whole = line(2)
    pipes.write(0, STREAM, whole[:20])
    pipes.relay.finish(stays=True)
    pipes.relay.turn_to(wanted, size, board)
    pipes.write(0, STREAM, whole[20:])  # a thread of the rank was writing it
    pipes.finish()
    assert len(publisher.told) == 3


def test_a_display_that_the_notebook_does_not_take_is_printed(publisher: Publisher) -> None:
    sent = wire.line_of({"data": {"text/html": "broken", "text/plain": "<HTML>"}})
    assert caller.publish((sent or b"").strip()) == "<HTML>\n"
    sent = wire.line_of({"clear": True})
    assert caller.publish((sent or b"").strip()) == ""
    assert caller.clears((sent or b"").strip())
    assert publisher.told == [True]


# In a rank


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, int]]:
    """A module with what IPython's has, as a rank has replaced it, and the pipe that it writes to."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    names = {name: None for name in ("display", "publish_display_data", "clear_output")}
    module = types.SimpleNamespace(**names, DisplayHandle=lambda number: ("handle", number))
    monkeypatch.setitem(sys.modules, rank.FUNCTIONS, module)  # type: ignore[arg-type]
    monkeypatch.setattr(rank, "_COPIES", ())
    monkeypatch.setattr(builtins, "display", None, raising=False)
    monkeypatch.setattr(IPython, "get_ipython", lambda: None)
    rank.install(writer)
    aside = module.clear_output.__self__._pipe.fd
    yield module, reader
    for fd in {reader, writer, aside}:
        os.close(fd)


class Table:
    def _repr_html_(self) -> str:
        return "<table>"

    def __repr__(self) -> str:
        return "a table"


def sent(reader: int) -> list[dict[str, Any]]:
    found = [wire.read(line) for _, line in LineCutter().feed(os.read(reader, 1 << 16), 0.0)]
    return [one[1] for one in found if one is not None]


def test_objects_are_sent_in_all_their_forms(functions: tuple[Any, int]) -> None:
    module, reader = functions
    module.display(Table(), metadata={"a": 1})
    module.display({"text/html": b"raw"}, raw=True)
    module.publish_display_data({"text/plain": "x"}, transient={"display_id": "7"}, update=True)
    module.clear_output(wait=True)
    forms = {"text/plain": "a table", "text/html": "<table>"}
    assert sent(reader) == [
        {"data": forms, "metadata": {"a": 1}},
        {"data": {"text/html": "cmF3"}, "metadata": {}},
        {"data": {"text/plain": "x"}, "metadata": {}, "transient": {"display_id": "7"}, "update": True},
        {"clear": True},
    ]


def test_a_display_can_be_updated(functions: tuple[Any, int]) -> None:
    module, reader = functions
    kind, number = module.display(display_id=True)
    assert module.display(Table(), display_id=number, update=True) == (kind, number)
    first, second = sent(reader)
    assert first == {"data": {}, "metadata": {}, "transient": {"display_id": number}}
    assert second["update"]
    with pytest.raises(TypeError, match="display_id required"):
        module.display(Table(), update=True)


def test_a_display_that_is_too_large_is_told(functions: tuple[Any, int], monkeypatch: pytest.MonkeyPatch) -> None:
    module, reader = functions
    monkeypatch.setattr(wire, "LIMIT", 200)
    module.display({"text/html": "x" * 200, "text/plain": "a table"}, raw=True)
    assert sent(reader)[0]["data"] == {"text/plain": "a table (not shown: it takes more than 0 MiB)"}


def test_a_rank_that_is_not_heard_prints(functions: tuple[Any, int], capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1, a worker of rank 0, and where other code has closed the descriptor."""
    module, _ = functions
    rank.install(-1)
    kind, number = module.display(Table(), display_id=True)
    module.clear_output()
    assert (kind, capsys.readouterr().out) == ("handle", "a table\n")
    assert number
