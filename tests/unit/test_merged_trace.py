"""Traces of several ranks become one: numbers of their own, one beginning, and never a whole trace in memory."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlaunch.caller.report.launch_report import LaunchReport, RankReport, Span
from mlaunch.profile import caller as profile_caller
from mlaunch.profile.caller import CutTraceError, events_of

BEGUN = 1_000_000.0  # seconds of the epoch
BASE = 999_000 * 10**9  # nanoseconds


def report(*pids: int) -> LaunchReport:
    run = (Span("run", 1.0, 3.0),)
    ranks = [RankReport(rank, pid, "cpu", run, 0, None, "returned") for rank, pid in enumerate(pids)]
    return LaunchReport("train()", "here", 5.0, 0, len(pids), tuple(ranks), begun=BEGUN)


def part(folder: Path, rank: int, events: list[dict[str, Any]], end: str = "]}") -> str:
    """As torch.profiler writes it: an object whose events are one name of many."""
    path = folder / f"rank-{rank}.json"
    head = {"schemaVersion": 1, "deviceProperties": [{"id": 0}], "displayTimeUnit": "ms", "baseTimeNanoseconds": BASE}
    text = json.dumps(head, indent=2)[:-2] + ',\n  "traceEvents": [\n'
    path.write_text(text + ",\n".join(map(json.dumps, events)) + end)
    return str(path)


def of_rank(pid: int) -> list[dict[str, Any]]:
    return [
        {"name": "process_name", "ph": "M", "ts": 1, "pid": pid, "tid": 0, "args": {"name": "python"}},
        {"name": "process_name", "ph": "M", "ts": 1, "pid": 0, "tid": 0, "args": {"name": "python"}},
        {"name": "process_sort_index", "ph": "M", "ts": 1, "pid": 0, "tid": 0, "args": {"sort_index": 5_000_000}},
        {"name": "process_name", "ph": "M", "ts": 1, "pid": 1, "tid": 0, "args": {"name": "python"}},
        {"name": "thread_name", "ph": "M", "ts": 1, "pid": pid, "tid": pid, "args": {"name": "thread"}},
        {"name": "add", "ph": "X", "ts": 1e9 + 2e6, "dur": 1.5, "pid": pid, "tid": pid},
        {"name": "ac2g", "ph": "s", "id": 7, "cat": "ac2g", "ts": 1e9 + 2e6, "pid": pid, "tid": pid},
        {"name": "ac2g", "ph": "f", "id": 7, "cat": "ac2g", "ts": 1e9 + 2e6 + 1, "pid": 0, "tid": 7, "bp": "e"},
        {"name": "thread_name", "ph": "M", "ts": 1, "pid": pid, "tid": 9, "args": {"name": "late"}},
        {"name": "process_sort_index", "ph": "M", "ts": 1, "pid": "Spans", "tid": 0, "args": {"sort_index": 9}},
        {"name": "Window End", "ph": "i", "s": "g", "ts": 1e9, "pid": "", "tid": ""},
    ]


def merged(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def test_ranks_of_one_number_are_told_apart(tmp_path: Path) -> None:
    """Also where their processes have one number, as on two machines, or in two containers."""
    parts = {rank: part(tmp_path, rank, of_rank(42)) for rank in (0, 1)}
    assert profile_caller.write_trace(str(tmp_path / "whole"), report(42, 42), parts, compressed=False) == {}
    events = merged(tmp_path / "whole")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {
        1000: "rank 0 (pid 42, cpu) of train()", 1001: "rank 0: python",
        2000: "rank 1 (pid 42, cpu) of train()", 2001: "rank 1: python",
    }  # fmt: skip
    flows = [(event["ph"], event["pid"], event["id"]) for event in events if "id" in event]
    assert flows == [("s", 1000, 14), ("f", 1001, 14), ("s", 2000, 15), ("f", 2001, 15)]
    assert {event["pid"] for event in events} == names.keys()
    assert [event["pid"] for event in events if event["ph"] == "i"] == [1000, 2000]
    threads = [(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"]
    assert threads == [(1000, 0), (1000, 42), (1000, 9), (2000, 0), (2000, 42), (2000, 9)]


def test_all_times_count_from_the_call(tmp_path: Path) -> None:
    """The parts count from another moment than the launch."""
    whole = tmp_path / "whole"
    profile_caller.write_trace(str(whole), report(42), {0: part(tmp_path, 0, of_rank(42))}, compressed=False)
    found = {event["name"]: (event["ts"], event["dur"]) for event in merged(whole) if event["ph"] == "X"}
    assert found == {"run": (1e6, 2e6), "add": (2e6, 1.5)}
    assert json.loads(whole.read_text())["baseTimeNanoseconds"] == BEGUN * 1e9


def test_a_rank_without_a_part_has_its_timeline(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gz"
    profile_caller.write_trace(str(whole), report(42, 43), {}, compressed=True)
    with gzip.open(whole) as file:
        events = json.load(file)["traceEvents"]
    assert [(event["name"], event["pid"]) for event in events if event["ph"] == "X"] == [("run", 1000), ("run", 2000)]


@pytest.mark.parametrize("end", ["", ',\n{"name": "add", "ts": 12', "]"])
def test_a_part_that_was_cut(tmp_path: Path, end: str) -> None:
    """What came whole stands there, and the rest is told."""
    parts = {0: part(tmp_path, 0, of_rank(42), end), 1: part(tmp_path, 1, of_rank(43))}
    lacks = profile_caller.write_trace(str(tmp_path / "whole"), report(42, 43), parts, compressed=False)
    assert lacks == {0: "it ends too early"}
    assert [event["pid"] for event in merged(tmp_path / "whole") if event["name"] == "add"] == [1000, 2000]


def test_a_text_that_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "part").write_text("[]")
    with pytest.raises(CutTraceError, match=r"no \{ where there should be one"):
        list(events_of(str(tmp_path / "part")))
    (tmp_path / "part").write_text('{"traceEvents": [{]}' + " " * (20 << 20))
    with pytest.raises(CutTraceError, match="it holds what is no JSON"):
        list(events_of(str(tmp_path / "part")))


def test_values_that_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a part of the text ends: in a name, a number, a space."""
    path = part(tmp_path, 0, of_rank(42))
    whole = list(events_of(path))
    assert dict(whole[:4])["baseTimeNanoseconds"] == BASE
    assert [value for name, value in whole if name == "traceEvents"] == of_rank(42)
    for size in (1, 2, 3, 7, 100):
        monkeypatch.setattr(profile_caller, "_READ", size)
        assert list(events_of(path)) == whole


@pytest.mark.slow
def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    filler = {"name": "add", "ph": "X", "ts": 1, "dur": 1, "pid": 42, "tid": 42, "args": {"Call stack": "x" * 2000}}
    path = part(tmp_path, 0, [filler] * 8_000)
    assert (size := Path(path).stat().st_size) > 15 << 20
    tracemalloc.start()
    profile_caller.write_trace(str(tmp_path / "whole"), report(42), {0: path}, compressed=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 3


def test_ranks_of_several_machines_have_the_times_of_their_own_clocks(tmp_path: Path) -> None:
    told = report(42, 42)
    told = replace(told, ranks=tuple(replace(rank, host=f"n{rank.rank}") for rank in told.ranks))
    profile_caller.write_trace(str(tmp_path / "whole"), told, {}, compressed=False)
    labels = [event["args"]["labels"] for event in merged(tmp_path / "whole") if event["name"] == "process_labels"]
    assert labels == ["clock of n0", "clock of n1"]
