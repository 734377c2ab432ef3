"""Who has the prompt of debuggers in ranks, and what is typed there, without ranks."""

from __future__ import annotations

import pytest

from mlaunch.debug.caller.prompts import ForRanks, Prompts, SwitchTo, TellWho, parse
from mlaunch.debug.wire import Onward, PromptAsks, PromptLeft, PromptSays


class Table:
    """Prompts, with what they have shown and the time that they see."""

    def __init__(self) -> None:
        self.shown = ""
        self.now = 0.0
        self.prompts = Prompts(self.show, lambda: self.now)

    def show(self, text: str) -> None:
        self.shown += text

    def stop(self, *ranks: int, said: str = "") -> None:
        for rank in ranks:
            if said:
                self.prompts.take(rank, PromptSays(said))
            self.prompts.take(rank, PromptAsks(f"({rank}) ", "train.py:3 in train"))

    def leave(self, rank: int, how: Onward) -> None:
        self.prompts.take(rank, PromptLeft(how, "train.py:3 in train"))


@pytest.mark.parametrize(
    ("line", "wish"),
    [
        ("n", ForRanks((1,), "n")),
        ("", ForRanks((1,), "")),
        ("all n", ForRanks((), "n")),
        ("  all  p x ", ForRanks((), "p x ")),
        ("all(x > 0)", ForRanks((1,), "all(x > 0)")),
        ("all = 3", ForRanks((1,), "all = 3")),
        ("all (x)", ForRanks((1,), "all (x)")),
        ("ranks 3,1 p x", ForRanks((1, 3), "p x")),
        ("rank 2 n", ForRanks((2,), "n")),
        ("ranks = [1, 2]", ForRanks((1,), "ranks = [1, 2]")),
        ("switch 2", SwitchTo(2)),
        ("switch on", ForRanks((1,), "switch on")),
        ("who", TellWho()),
        ("whole", ForRanks((1,), "whole")),
    ],
)
def test_words(line: str, wish: object) -> None:
    assert parse(line, 1) == wish


def test_ranks_have_their_turn_in_the_order_of_their_coming() -> None:
    table = Table()
    assert table.prompts.next() is None
    table.stop(2, said="stopped\n")
    table.stop(0, said="here\n")
    assert table.prompts.next() == (2, "(2) ")
    assert table.shown == "stopped\n"
    table.prompts.answer([2])
    table.leave(2, Onward.RUNS)
    assert table.prompts.next() == (0, "(0) ")
    assert table.shown == "stopped\nhere\n"


def test_a_rank_that_takes_a_step_keeps_the_prompt() -> None:
    table = Table()
    table.stop(2, 0)
    assert table.prompts.next() == (2, "(2) ")
    table.prompts.answer([2])
    assert table.prompts.next() is None  # the command may take long
    assert table.prompts.timeout() is None
    table.leave(2, Onward.STEPS)
    assert table.prompts.next() is None
    assert table.prompts.timeout() == 1.0
    table.stop(2)
    assert table.prompts.next() == (2, "(2) ")
    table.prompts.answer([2])
    table.leave(2, Onward.STEPS)
    table.now = 2.0  # it waits for the others
    assert table.prompts.timeout() == 0.0
    assert table.prompts.next() == (0, "(0) ")
    assert list(table.prompts.stopped()) == [0]


def test_answers_of_several_ranks_are_shown_in_their_order() -> None:
    table = Table()
    table.stop(1, 0)
    assert table.prompts.next() == (1, "(1) ")
    table.prompts.answer([0, 1])
    table.stop(1, said="one\nmore\n")
    assert table.prompts.next() is None
    table.stop(0, said="zero\n")
    assert table.prompts.next() == (1, "(1) ")
    assert table.shown == "[0] zero\n[1] one\n[1] more\n"


def test_another_is_given_the_prompt() -> None:
    table = Table()
    table.stop(1, 0)
    assert table.prompts.next() == (1, "(1) ")
    table.prompts.switch(0)
    assert table.prompts.next() == (0, "(0) ")
    table.prompts.forget(0)
    assert table.prompts.next() == (1, "(1) ")


def test_nobody_is_asked_once_the_launch_is_about_to_end() -> None:
    table = Table()
    table.stop(1, 0)
    assert table.prompts.next() == (1, "(1) ")
    table.prompts.answer([1])
    table.leave(1, Onward.FAILS)
    assert table.prompts.next() is None
    table.leave(0, Onward.QUITS)
    assert table.prompts.quit == (0, "train.py:3 in train")
