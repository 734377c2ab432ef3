"""Whether ranks get anywhere: on tables, and a watch whose clock and answers a test moves."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlaunch.base.exceptions import RankFailure
from mlaunch.caller.launch import handle
from mlaunch.caller.launch.handle import Watchers
from mlaunch.core.records import Noticed
from mlaunch.insight.agent import activity, children_of, file_of
from mlaunch.insight.caller import StallWatch, answers
from mlaunch.insight.wire import PULSE, WHY, StallTerms
from mlaunch.protocol.messages import Question
from tests.processes import wait_until

IDLE = {"main": 1.0, "threads": 1.0, "children": 1.0, "bytes": 9, "switches": 5}
TORCH = ["/x/site-packages/torch/distributed/distributed_c10d.py", "9", "all_reduce"]


def operations(entered: int, group: str = "0 cpu") -> dict[str, Any]:
    begun = {"name": group, "members": [0, 1], "number": entered, "latest": "", "sent": [], "received": []}
    return {"groups": [begun], "waits": [], "made": 1}


def rank(number: int, entered: int, line: int, *, within: bool = True, **changes: Any) -> dict[str, Any]:
    """One as its agent tells of it, in an operation or beside one."""
    told: dict[str, Any] = {
        "rank": number,
        "state": "running the function",
        "marks": ["running the function", 0, 0, 0, entered],
        "frames": [*([TORCH] if within else []), ["/home/me/train.py", str(line), "train"]],
        "entered": operations(entered),
        "activity": IDLE,
        "children": [],
    }
    return {**told, **changes}


WAITS, LATE = rank(0, 5, 21), rank(1, 4, 18, within=False)


def used(**more: float) -> dict[str, float]:
    return {**IDLE, **{kind: IDLE[kind] + amount for kind, amount in more.items()}}


@pytest.mark.parametrize(
    ("changes", "works"),
    [
        ({}, False),
        ({"marks": ["running the function", 0, 0, 1, 4]}, True),
        ({"marks": ["running the function", 0, 0, None, None]}, False),  # it has not answered
        ({"frames": [["/home/me/train.py", "19", "train"]]}, True),
        ({"activity": used(main=0.5)}, True),
        ({"activity": used(threads=0.02, bytes=9000)}, False),  # to answer us took that
        ({"activity": used(threads=0.5)}, True),
        ({"activity": used(children=0.1)}, True),
        ({"activity": used(bytes=10**6)}, True),
        ({"activity": {}}, False),  # it is gone
    ],
)
def test_a_rank_that_works_is_known(changes: dict[str, Any], works: bool) -> None:
    assert answers.work([WAITS, LATE], [WAITS, {**LATE, **changes}]) is works


def test_a_rank_that_spins_does_not_work() -> None:
    spun = {"activity": used(main=1.0, threads=1.0)}
    assert not answers.work([WAITS, LATE], [{**WAITS, **spun}, LATE])
    there = {"entered": operations(5, "0 cuda"), "frames": [["/home/me/train.py", "22", "train"]]}
    ahead, behind = {**WAITS, **there}, {**LATE, "entered": operations(4, "0 cuda")}
    assert not answers.work([ahead, behind], [{**ahead, **spun}, behind])  # it waits for what the device does
    assert answers.work([ahead, behind], [ahead, {**behind, **spun}])
    assert answers.work([ahead, ahead], [{**ahead, **spun}, ahead])


@pytest.mark.parametrize(
    ("ranks", "begun"),
    [
        ([rank(0, 2, 7, within=False), rank(1, 2, 7, within=False)], False),  # a function that serves, or sleeps
        ([WAITS, LATE], True),
        ([rank(0, 2, 7), rank(1, 2, 7)], True),
        ([rank(0, 2, 7, within=False, marks=["running the function", 1, 3, 0, 2])], True),
    ],
)
def test_a_function_that_shows_no_progress_at_all_is_not_judged(ranks: list[dict[str, Any]], begun: bool) -> None:
    assert answers.has_begun(ranks) is begun


class World:
    """A watch of two ranks, each of whose questions is answered at once."""

    begun = 0.0

    def __init__(self, limit: float, *, ends: bool = False) -> None:
        self.now, self.asked, self.said, self.failures = 0.0, [b""], [""], [""]
        self.asked.clear()
        self.said.clear()
        self.failures.clear()
        self.ranks = [WAITS, LATE]
        call: Any = self
        self.watch = StallWatch(call, limit, ends)

    def clock(self) -> float:
        return self.now

    def ask(self, word: bytes, take: Any) -> None:
        self.asked.append(word)
        take(self.ranks)

    def found(self, noticed: Noticed, failure: RankFailure | None = None) -> None:
        assert noticed.kind == "stall"
        if failure is None:
            self.said.append(noticed.what)
        else:
            self.failures.append(failure.what)

    def until(self, end: float) -> None:
        """Goes from step to step, as whoever drives a launch does."""
        while self.watch.due <= end:
            self.now = max(self.now, self.watch.due)
            self.watch.take_steps()
        self.now = end

    def move(self) -> None:
        self.ranks = [{**one, "marks": [*one["marks"][:4], one["marks"][4] + 1]} for one in self.ranks]


def test_one_report_and_one_of_a_recovery_and_it_is_armed_again() -> None:
    world = World(40.0)
    world.until(35.0)
    assert world.asked == [PULSE] * 3
    world.move()
    world.until(79.0)
    assert world.said == []
    world.until(500.0)
    (said,) = world.said
    assert said.startswith("has made no progress for 41 s: rank 1 has not entered all_reduce #5 of the default group")
    assert world.asked.count(WHY) == 2
    world.move()
    world.until(511.0)
    assert world.said[1:] == ["makes progress again, after 7 min 41 s"]
    world.until(600.0)
    assert len(world.said) == 3


def test_a_rank_that_works_is_looked_at_again_later() -> None:
    world = World(40.0)
    world.until(39.0)
    for turn in range(5):
        world.ranks = [WAITS, {**LATE, "activity": used(main=float(turn))}]
        world.until(world.now + 1.0)
    world.until(80.0)
    assert world.said == []
    world.until(90.0)
    assert len(world.said) == 1


def test_the_end_of_what_has_stalled() -> None:
    world = World(8.0, ends=True)
    world.until(9.0)
    assert world.said == []
    (what,) = world.failures
    assert what.startswith("made no progress for 9 s: rank 1 has not entered all_reduce #5")


def test_who_waits_for_something_outside_is_looked_at_for_longer() -> None:
    """A service may take longer to answer than two looks are apart; one that never does is told of, too."""
    world = World(8.0)
    asleep = {**LATE, "asleep": "sk_wait_data"}
    for turn in range(4):
        world.ranks = [WAITS, {**asleep, "activity": used(switches=turn)}]
        world.until(world.now + 4.0)
    assert world.said == []
    world.until(30.0)
    assert len(world.said) == 1


def test_a_rank_that_waits_for_others_stirs_in_vain() -> None:
    """As NCCL does that looks every millisecond, and one that a signal has woken as it did not answer."""
    known, stirs = rank(0, 5, 21), {"activity": used(switches=3)}
    assert not answers.stirred([known], [{**known, **stirs}])
    late = rank(1, 4, 18, within=False)
    assert answers.stirred([late], [{**late, **stirs}])
    assert not answers.stirred([late], [{**late, **stirs, "entered": None}])


def test_ranks_without_a_call() -> None:
    world = World(4.0)
    world.ranks = [rank(0, 2, 7, marks=["waiting for a call", 0, 0, 0, 2], frames=[])]
    world.until(100.0)
    assert world.said == []
    assert WHY not in world.asked


class Watched(Watchers):
    """Those of a launch with these sections. ``sent``: what is asked of its agent."""

    def __init__(self, sections: dict[str, object], cluster: object = None) -> None:
        self.sent = list[Question]()
        launch: Any = SimpleNamespace(cluster=cluster, sections=sections)
        super().__init__(launch, self.sent.append, lambda *_: None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What watchers take for the time."""
    moved = SimpleNamespace(now=0.0)
    monkeypatch.setattr(handle, "time", SimpleNamespace(monotonic=lambda: moved.now))
    return moved


def test_what_a_call_asks_for_is_watched_soon_and_what_each_has_later(clock: SimpleNamespace) -> None:
    asked, usual = Watched({"insight": StallTerms(0.4)}), Watched({})
    for watchers in (asked, usual):
        assert watchers.timeout() is None
        watchers.begin(0.0)
    assert (asked.timeout(), usual.timeout()) == (0.2, 10.0)
    clock.now = 0.2
    asked.take_steps()
    assert [told.about for told in asked.sent] == [PULSE]
    clock.now = 10.0
    usual.take_steps()
    assert (usual.sent, usual.timeout()) == ([], 65.0)  # a quarter of what is usual
    usual.rest()
    assert usual.timeout() is None


def test_answers_of_the_last_call_are_not_taken(clock: SimpleNamespace) -> None:
    watchers = Watched({"insight": StallTerms(0.4)})
    watchers.begin(0.0)
    clock.now = 0.2
    watchers.take_steps()
    watchers.begin(0.2)
    watchers.take(1, {})
    assert watchers.timeout() == pytest.approx(0.2)


@pytest.mark.parametrize(("terms", "cluster"), [(StallTerms(None), None), (StallTerms(0.4), "others")])
def test_calls_without_a_watch(clock: SimpleNamespace, terms: StallTerms, cluster: object) -> None:
    """Their options say so, or other machines take part that have callers of their own: none sees all ranks."""
    watchers = Watched({"insight": terms}, cluster)
    watchers.begin(0.0)
    clock.now = 100.0
    watchers.take_steps()
    assert (watchers.sent, watchers.timeout()) == ([], None)


@pytest.mark.parametrize("before", ["joining the process group", "receiving the function and its arguments"])
def test_a_function_that_serves_is_not_judged_though_it_was_slow_to_start(before: str) -> None:
    """What its ranks have done until they came to it shows nothing of the function."""
    world = World(40.0)
    serving = [rank(0, 1, 7, within=False), rank(1, 1, 7, within=False)]
    world.ranks = [{**one, "marks": [before, 0, 0, 0, 0]} for one in serving]
    world.until(15.0)
    world.ranks = [serving[0], {**serving[1], "marks": [before, 0, 0, 0, 1]}]
    world.until(35.0)
    world.ranks = serving
    world.until(1000.0)
    assert world.said == []
    assert WHY in world.asked
    world.move()
    world.until(1020.0)
    world.until(1100.0)
    assert len(world.said) == 1


JOINS = rank(1, 0, 0, state="joining the process group", marks=["joining the process group", 0, 0, 0, 0], frames=[])
SENDS = rank(0, 3, 7, within=False, state="sending its value", marks=["sending its value", 0, 0, 0, 3])
RETURNED = rank(0, 3, 0, state="waiting for the others to return (it returned)", frames=[],
                marks=["waiting for the others to return", 0, 0, 0, 3])  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([{**JOINS, "rank": 0}, JOINS], "ranks 0-1 are joining the process group"),
        ([{**JOINS, "rank": 0, "state": "binding its device"}, JOINS],
         "rank 0 is binding its device; rank 1 is joining the process group"),
        ([SENDS, {**RETURNED, "rank": 1}], "rank 0 is sending its value, in train at train.py:7"),
    ],
)  # fmt: skip
def test_ranks_that_do_not_come_to_the_function_or_from_it_have_stalled(ranks: list[Any], said: str) -> None:
    world = World(40.0)
    world.ranks = ranks
    world.until(100.0)
    assert [text.partition("\n")[0] for text in world.said] == [f"has made no progress for 41 s: {said}"]


@pytest.mark.parametrize("last", [RETURNED, {**RETURNED, "state": "shutting down (it returned)"}])
def test_ranks_that_have_all_returned_have_not_stalled(last: dict[str, Any]) -> None:
    """Their agent ends them."""
    world = World(40.0)
    world.ranks = [RETURNED, {**last, "rank": 1}]
    world.until(1000.0)
    assert world.said == []


def test_places_of_several() -> None:
    other = rank(2, 4, 9, within=False)
    assert answers.places([WAITS, LATE]) == []
    assert answers.places([WAITS, LATE, other]) == [
        "rank 0 is in all_reduce at train.py:21",
        "rank 1 is in train at train.py:18",
        "rank 2 is in train at train.py:9",
    ]


def test_the_file_that_a_process_waits_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "shard-7")

    def read() -> None:
        (tmp_path / "shard-7").read_text()

    child = multiprocessing.get_context("fork").Process(target=read, daemon=True)
    child.start()
    held = os.open(tmp_path / "shard-7", os.O_WRONLY)  # once it reads
    try:
        said = f", reading {tmp_path}/shard-7" if os.uname().machine == "x86_64" else ""
        wait_until(lambda: file_of(child.pid or 0) == said)
    finally:
        os.close(held)
        child.join()
    assert file_of(2**22 + 1) == ""


def test_the_activity_of_a_process_and_its_children() -> None:
    def spin() -> None:
        while True:
            sum(range(1000))

    before = activity(os.getpid())
    child = multiprocessing.get_context("fork").Process(target=spin, daemon=True)
    child.start()
    try:
        assert child.pid in children_of(os.getpid())
        while activity(os.getpid())["children"] < before["children"] + 0.1:
            signal.sigtimedwait([], 0.01)
    finally:
        child.kill()
        child.join()
    now = activity(os.getpid())
    assert now["children"] > before["children"] + 0.05  # of one that is gone
    assert now["main"] > before["main"]
    assert now["bytes"] > before["bytes"]
    assert activity(2**22 + 1) == {"switches": 0, "main": 0.0, "threads": 0, "children": 0, "bytes": 0}
