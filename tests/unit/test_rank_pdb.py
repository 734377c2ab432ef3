"""The debugger of a rank, without one: what it says, and how it goes on. No torch is needed: any Python can run it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from mlaunch.debug.rank.rank_pdb import RankPdb, Talk
from mlaunch.debug.wire import Onward, PromptAsks, PromptLeft, PromptLine, PromptSays
from mlaunch.protocol.channel import Channel
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks show places without colours."""
    monkeypatch.setenv("TERM", "dumb")


def debugged(run: Callable[[Talk], object], *lines: str | None) -> tuple[str, list[PromptLeft]]:
    """Runs what talks, answers with these lines; returns what is said, with prompts and lines, and how it has left."""
    ours, theirs = Channel.pair()
    said, left, answers = [], [], list(lines)

    def answer() -> None:
        while True:
            try:
                record, _ = ours.receive()
            except EOFError:
                return
            if isinstance(record, PromptSays):
                said.append(record.text)
            elif isinstance(record, PromptAsks):
                line = answers.pop(0)
                said.append(f"{record.prompt}{line}\n")
                ours.send(PromptLine(line))
            else:
                left.append(record)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        run(Talk(theirs, 1))
    finally:
        sys.settrace(None)
        theirs.close()
        thread.join()
        ours.close()
    assert not answers
    return "".join(said), left


def outer(stop: Callable[[], None]) -> int:
    number = 1
    stop()
    number = inner(number)
    return number  # noqa: RET504 - a line to step to


def inner(number: int) -> int:
    return number + 1


def stopping(talk: Talk) -> object:
    debugger = RankPdb(talk)
    return outer(lambda: debugger.set_trace(sys._getframe(1)))


def failing(talk: Talk) -> None:
    try:
        outer(None)  # type: ignore[arg-type]
    except TypeError as error:
        with talk.turn(""):
            RankPdb(talk, failed=True).interaction(None, error.__traceback__)


def hows(left: list[PromptLeft]) -> list[Onward]:
    return [record.how for record in left]


def test_a_debugger_steps_and_goes_on() -> None:
    said, left = debugged(stopping, "p number", "n", "p number", "c")
    assert "(Pdb, rank 1) p number\n1\n" in said
    assert "-> number = inner(number)\n" in said
    assert hows(left) == [Onward.STEPS, Onward.RUNS]
    assert " in outer" in left[0].place


def test_a_debugger_stops_at_its_breakpoints_until_it_is_detached() -> None:
    said, left = debugged(stopping, "b inner", "c", "detach")
    assert "Breakpoint " in said
    assert "-> return number + 1" in said
    assert hows(left) == [Onward.RUNS, Onward.RUNS]


def test_steps_into_functions_and_back() -> None:
    said, _ = debugged(stopping, "s", "s", "s", "r", "c")
    assert "--Call--" in said
    assert "--Return--" in said


@pytest.mark.parametrize("line", ["q", None, "c", "detach"])
def test_after_a_failure_everything_ends(line: str | None) -> None:
    said, left = debugged(failing, "p number", "n", "s", "restart", "u", line)
    assert "> " in said
    assert "outer()" in said
    assert said.count("*** the function has failed here and cannot continue") == 2
    assert "*** a rank cannot be started again from here" in said
    assert hows(left) == [Onward.FAILS]


def test_commands_that_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(talk: Talk) -> None:
        monkeypatch.setattr("builtins.input", talk.ask)
        stopping(talk)

    said, _ = debugged(run, "h", "h who", "b inner", "clear", "y", "x = )", "interact", "number + 41", None, "c")
    assert "detach" in said
    assert "gives a command to all ranks that have stopped" in said
    assert "SyntaxError" in said
    assert "42\n" in said


def test_input_asks_with_the_rank_in_front() -> None:
    told: list[str] = []

    def ask(talk: Talk) -> None:
        told.append(talk.ask("how many? "))
        with pytest.raises(EOFError, match="no more lines come from the terminal"):
            talk.ask()

    said, left = debugged(ask, "three", None)
    assert said == "[1] how many? three\n[1] None\n"
    assert told == ["three"]
    assert hows(left) == [Onward.RUNS, Onward.RUNS]


def test_a_long_text_comes_whole() -> None:
    said, _ = debugged(stopping, "p 'x' * 100_000", "c")
    assert "x" * 100_000 in said


def test_a_debugger_shows_places_as_ipythons_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """With lines around, in colours, if pygments is there; as pdb does in a terminal that has none."""
    pytest.importorskip("pygments")

    def stop(talk: Talk) -> None:
        outer(lambda: RankPdb(talk).set_trace(sys._getframe(1)))

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    said, _ = debugged(stop, "c")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
    assert plain != said
    line = "stop()" if sys.version_info >= (3, 13) else "number = inner(number)"  # pdb stops a line earlier since then
    shown = rf"test_rank_pdb.py\(\d+\)outer\(\)\n( +\d+ .*\n){{2}}->  +\d+     {re.escape(line)}\n"
    assert re.search(shown, plain)
    monkeypatch.setenv("NO_COLOR", "1")
    assert f"outer()\n-> {line}\n" in debugged(stop, "c")[0]


TWO_TASKS = """
import sys
from mlaunch.debug.rank import visit
seen = []
def leave(frame):
    sys.settrace(None)
    seen.append("leave")
def stop(frame):
    visit._in_main_thread(leave)  # as the control thread does where the visitor leaves at this moment
    sys.settrace(lambda *event: None)
    seen.append("stop")
visit._in_main_thread(stop)
while len(seen) < 2:
    pass
print(seen)
"""


def test_a_visitor_that_leaves_while_its_rank_begins_to_stop_does_not_hang_the_rank() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_TASKS], capture_output=True, text=True, check=False, timeout=60, cwd=ROOT
    )
    assert done.stdout == "['stop', 'leave']\n", done.stderr
