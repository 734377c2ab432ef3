"""Who holds up whom, on tables."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mlaunch.caller.running_launches import whole
from mlaunch.insight.caller.answers import of_stacks, sentence, view_of
from mlaunch.insight.caller.wait_graph import RankView, WaitView, why
from mlaunch.protocol.messages import ANY, GroupNumbers, Operations, Phase, RankStacks
from mlaunch.rank import function

WORLD = (0, 1, 2)
BOTTOM = function.__file__
OPERATIONS: dict[str, Any] = {"groups": [], "waits": [], "made": 1}
GROUP = {"name": "0 cpu", "members": [0, 1], "number": 3, "latest": "all_reduce", "sent": [[0, 2]], "received": []}


def view(rank: int, number: int | None, line: int = 0, operation: str = "", **others: int) -> RankView:
    """A rank at this number of the default group; ``others``: of the groups a and b."""
    entered = None
    if number is not None:
        entered = {"0 cpu": (WORLD, number)} | {name: ((0, 1), count) for name, count in others.items()}
    doing = f"in {operation or 'next'} at train.py:{line}"
    waits = (WaitView(operation, doing),) if operation else ()
    return RankView(rank, doing, operation, waits, None, entered)


@pytest.mark.parametrize(
    ("views", "said"),
    [
        (
            [view(0, 14, 21, "all_reduce"), view(1, 13, 18), view(2, 14, 21, "all_reduce")],
            "rank 1 has not entered all_reduce #14 of the default group (ranks 0, 2 wait for it, in all_reduce at "
            "train.py:21); rank 1 is in next at train.py:18",
        ),
        (
            [view(0, 14, 21, "all_reduce"), view(1, None, 18)],
            "rank 1 does not answer (rank 0 waits for it, in all_reduce at train.py:21); "
            "rank 1 was in next at train.py:18",
        ),
        (
            [view(0, 4, 7, "all_reduce", a=6, b=5), view(1, 4, 9, "all_reduce", a=5, b=6)],
            "ranks wait for each other, as they have entered groups in crossed order: rank 0 waits for rank 1 in the "
            "group of ranks 0-1 that torch calls 'a', in all_reduce at train.py:7; rank 1 waits for rank 0 in the "
            "group of ranks 0-1 that torch calls 'b', in all_reduce at train.py:9",
        ),
        (
            [view(0, 4, 7, "all_reduce"), view(1, 4, 9, "broadcast"), view(2, 4, 7, "all_reduce")],
            "the ranks are in different operations that stand for the same one: ranks 0, 2 are in all_reduce at "
            "train.py:7; rank 1 is in broadcast at train.py:9",
        ),
        (
            [view(rank, 4, 7, "all_reduce") for rank in WORLD],
            "all ranks are in all_reduce, and none is behind: the device or the network is slow or stuck, or much is "
            "sent",
        ),
        (
            [view(rank, 4, 7, "init_rpc") for rank in WORLD],
            "all ranks are in init_rpc, where they wait for each other at a store: is it hosted at the address that "
            "they were given?",
        ),
        (
            [view(rank, 4, 7, "all_reduce") for rank in WORLD[:2]],
            "the ranks here are in all_reduce, and none is behind; ask for rank 2 on their machines",
        ),
        (
            [view(0, 5, 7), view(1, 4, 7)],
            "no rank waits for another one in a collective or for a message",
        ),  # one computes ahead
    ],
)
def test_why(views: list[RankView], said: str) -> None:
    assert why(views) == said


def waiting(rank: int, *waits: WaitView, sent: Any = None, received: Any = None, number: int = 4) -> RankView:
    """A rank that waits for these, or rests; ``sent`` and ``received``: by rank."""
    counts = {"sent": {"0 cpu": sent or {}}, "received": {"0 cpu": received or {}}}
    doing = waits[0].doing if waits else "in rest"
    return RankView(rank, doing, "", waits, not waits, {"0 cpu": (WORLD, number)}, **counts)


def recv(peer: int) -> WaitView:
    return WaitView("recv", "in recv", "0 cpu", peer=peer, members=WORLD)


REDUCE = WaitView("all_reduce", "in all_reduce", "0 cpu", 5, members=WORLD)
SEEMS = WaitView("", "in step", is_known=False)


@pytest.mark.parametrize(
    ("views", "said"),
    [
        (  # who may be sent to already is not named
            [waiting(0, recv(1), received={1: 1, ANY: 2}), waiting(1, sent={0: 1}), waiting(2)],
            "rank 0 receives from rank 1, in recv, which sends as many messages: their tags or sizes differ, or the "
            "network is slow or stuck; rank 1 is in rest",
        ),
        (
            [waiting(0, recv(5), received={5: 1}), waiting(1), waiting(2)],
            "no rank waits for one that was asked; ask for rank 5 on their machines",
        ),
        (  # rank 2 waits for nobody, though it is ahead of rank 1 in the group
            [waiting(0, recv(2), received={2: 1}), waiting(1), waiting(2, number=5)],
            "rank 2 has not sent to rank 0 (rank 0 waits for it, in recv); rank 2 is in rest",
        ),
        (  # who seems to wait, in a circle, is its cause
            [waiting(0, SEEMS, number=5), waiting(1, recv(0), received={0: 1}), waiting(2, number=5)],
            "rank 0 has not sent to rank 1 (rank 1 waits for it, in recv); rank 0 is in step",
        ),
        (
            [waiting(0, SEEMS, number=5), waiting(1), waiting(2, number=5)],
            "rank 1 has not entered operation #5 of the default group (rank 0 is ahead of it, in step); rank 1 is in "
            "rest",
        ),
        (
            [waiting(0, REDUCE, number=5), RankView(1, "in match"), waiting(2, REDUCE, number=5)],
            "rank 1 does not answer (ranks 0, 2 wait for it, in all_reduce); rank 1 was in match",
        ),
    ],
)
def test_messages_and_who_is_ahead(views: list[RankView], said: str) -> None:
    assert why(views) == said


def test_a_rank_as_its_agent_tells_of_it() -> None:
    inner = ["/x/site-packages/torch/distributed/distributed_c10d.py", "9", "all_reduce"]
    told: dict[str, Any] = {
        "rank": 1,
        "state": "running the function (it was stopped by a signal)",
        "frames": [inner, ["/home/me/train.py", "21", "train"]],
        "entered": OPERATIONS | {"groups": [GROUP]},
        "children": ["(pid 8): it waits in the kernel"],
    }
    doing = "in all_reduce at train.py:21 (it was stopped by a signal); its child (pid 8): it waits in the kernel"
    begun = {"latest": {"0 cpu": "all_reduce"}, "sent": {"0 cpu": {0: 2}}, "received": {"0 cpu": {}}, "made": 1}
    known = {"entered": {"0 cpu": ((0, 1), 3)}, **begun}
    assert view_of(told) == RankView(1, doing, "all_reduce", (WaitView("all_reduce", doing),), None, **known)
    told |= {"entered": None, "children": [], "state": "running the function"}
    assert "where its control thread does not answer" in view_of(told).doing
    told |= {"frames": [], "state": "ended (it returned)"}
    assert view_of(told) == RankView(1, "ended (it returned)", returned=True)


def test_names_of_ranks_do_not_command_a_terminal() -> None:
    told = {"rank": 0, "state": "running the function", "frames": [["/home/\x1b[2J/a\nb.py", "3", "f\u202e"]]}
    assert view_of(told).doing.startswith(r"in f\u202e at a\nb.py:3")
    assert sentence([told, {"rank": 1, "state": "shutting down\x1b[2J (it returned)", "frames": []}]).isprintable()


def test_a_rank_that_has_returned_and_does_not_end() -> None:
    close = ["/home/me/train.py", "7", "close"]
    ended = {"rank": 0, "state": "ended (it returned)", "frames": []}
    leaves = {"rank": 1, "state": "shutting down (it returned)", "frames": [close], "entered": OPERATIONS}
    said = "all ranks have returned, and rank 1 is shutting down, in close at train.py:7 (it returned)"
    assert sentence([ended, leaves]) == said
    lacks = {**leaves, "frames": [[threading.__file__, "9", "_shutdown"]]}
    assert "shutting down, waiting for threads of its own that are no daemons" in sentence([ended, lacks])


def test_a_rank_that_has_returned_holds_up_the_others() -> None:
    stack = (
        'Current thread 0x1 (most recent call first):\n  File "/x/site-packages/torch/distributed/a.py", line 9 in '
        'barrier\n  File "/home/me/train.py", line 21 in train\n  File "' + BOTTOM + '", line 3 in live\n'
    )
    waits = RankStacks(0, Phase.RUNNING, "", stack, Operations((GroupNumbers("0 cpu", (0, 1), 3),)))
    assert of_stacks([waits], [1]) == (
        ["rank 1 has returned (rank 0 waits for it, in barrier at train.py:21)"],
        [1],
    )
    assert of_stacks([RankStacks(0, Phase.RUNNING, "", stack)], [1]) == ([], [])  # nobody has asked
    too_much = RankStacks(1, Phase.RUNNING, "", stack, Operations())
    assert of_stacks([waits, too_much], []) == ([], [])


def test_parts_of_one_launch_on_one_machine_are_asked_together() -> None:
    part, other = ({"id": "a", "ranks": [{"rank": rank} for rank in ranks]} for ranks in ((2, 3), (0, 1)))
    alone = {"id": "b", "ranks": [{"rank": 0}]}
    assert whole([part, alone, other]) == [{"id": "a", "ranks": [{"rank": rank} for rank in range(4)]}, alone]


def test_which_device_is_behind_in_what_all_have_entered() -> None:
    """A program may be far ahead of its device: all have begun the same, as their own numbers say."""
    wait, entered = WaitView("synchronize", "in synchronize"), {"0 cuda": (WORLD, 42)}
    views = [
        RankView(rank, wait.doing, "synchronize", (wait,), None, entered, completed={"0 cuda": done})
        for rank, done in enumerate((41, 40, 41))
    ]
    assert why(views) == (
        "all ranks are in synchronize, and none is behind: the device or the network is slow or stuck, or much is "
        "sent; of 42 operations of the default group, rank 1 has completed 40 on the device, ranks 0, 2 have completed "
        "41 on the device"
    )
    group = GROUP | {"name": "0 cuda", "completed": 2}
    told = {"rank": 0, "state": "running", "frames": [], "entered": OPERATIONS | {"groups": [group]}}
    assert view_of(told).completed == {"0 cuda": 2}
