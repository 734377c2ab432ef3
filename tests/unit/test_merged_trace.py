"""Traces of several ranks become one: numbers of their own, one clock, and never a whole trace in memory."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlaunch.caller.report import merged_trace
from mlaunch.caller.report.clocks import Clocks
from mlaunch.caller.report.merged_trace import CutTraceError, events_of
from mlaunch.caller.report.records import LaunchRecord, RankReport, Span
from mlaunch.caller.report.trace_times import TraceTimes
from mlaunch.protocol.messages.machine_messages import ClockCompared

BEGUN = 1_000_000.0  # seconds of the epoch
BASE = 999_000 * 10**9  # nanoseconds


def report(*pids: int) -> LaunchRecord:
    run = (Span("run", 1.0, 3.0),)
    ranks = [RankReport(rank, pid, "cpu", run, 0, None, "returned") for rank, pid in enumerate(pids)]
    return LaunchRecord("train()", "here", 5.0, 0, len(pids), tuple(ranks), begun=BEGUN)


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


def write(target: str, told: LaunchRecord, parts: dict[int, str], *, compressed: bool) -> dict[int, str]:
    return merged_trace.write(target, told, parts, TraceTimes(told, parts), compressed=compressed)


def merged(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def test_ranks_of_one_number_are_told_apart(tmp_path: Path) -> None:
    """Also where their processes have one number, as on two machines, or in two containers."""
    parts = {rank: part(tmp_path, rank, of_rank(42)) for rank in (0, 1)}
    assert write(str(tmp_path / "whole"), report(42, 42), parts, compressed=False) == {}
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


def test_one_clock(tmp_path: Path) -> None:
    """The parts count from another moment than the launch."""
    whole = tmp_path / "whole"
    write(str(whole), report(42), {0: part(tmp_path, 0, of_rank(42))}, compressed=False)
    found = {event["name"]: (event["ts"], event["dur"]) for event in merged(whole) if event["ph"] == "X"}
    assert found == {"run": (1e6, 2e6), "add": (2e6, 1.5)}
    assert json.loads(whole.read_text())["baseTimeNanoseconds"] == BEGUN * 1e9


def test_a_rank_without_a_part_has_its_timeline(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gz"
    write(str(whole), report(42, 43), {}, compressed=True)
    with gzip.open(whole) as file:
        events = json.load(file)["traceEvents"]
    assert [(event["name"], event["pid"]) for event in events if event["ph"] == "X"] == [("run", 1000), ("run", 2000)]


@pytest.mark.parametrize("end", ["", ',\n{"name": "add", "ts": 12', "]"])
def test_a_part_that_was_cut(tmp_path: Path, end: str) -> None:
    """What came whole stands there, and the rest is told."""
    parts = {0: part(tmp_path, 0, of_rank(42), end), 1: part(tmp_path, 1, of_rank(43))}
    lacks = write(str(tmp_path / "whole"), report(42, 43), parts, compressed=False)
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
        monkeypatch.setattr(merged_trace, "_READ", size)
        assert list(events_of(path)) == whole


@pytest.mark.slow
def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    filler = {"name": "add", "ph": "X", "ts": 1, "dur": 1, "pid": 42, "tid": 42, "args": {"Call stack": "x" * 2000}}
    path = part(tmp_path, 0, [filler] * 20_000)
    assert (size := Path(path).stat().st_size) > 30 << 20
    tracemalloc.start()
    write(str(tmp_path / "whole"), report(42), {0: path}, compressed=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 3


def compared(rank_start: int, ahead: float, at: float = BEGUN, error: float = 0.0) -> ClockCompared:
    """``begun`` is when the machines were all there, 0.5 s after the call on the first one's clock."""
    return ClockCompared(rank_start, 1, at, ahead, error, BEGUN + 0.5, BEGUN - 100.0 - ahead)


def on_machines(folder: Path, clocks: Clocks) -> tuple[TraceTimes, dict[tuple[int, str], float]]:
    """Two ranks that do the same at once, by clocks of which the second is 10 s behind; returns what stands there."""
    told = replace(report(42, 42), clocks=clocks)
    told = replace(told, ranks=tuple(replace(rank, host=f"n{rank.rank}") for rank in told.ranks))
    second = [{**event, **({"ts": event["ts"] - 10e6} if "ts" in event else {})} for event in of_rank(42)]
    parts = {0: part(folder, 0, of_rank(42)), 1: part(folder, 1, second)}
    for path in parts.values():
        os.utime(path, (BEGUN, BEGUN))
    times = TraceTimes(told, parts)
    merged_trace.write(str(folder / "whole"), told, parts, times, compressed=False)
    spans = (event for event in merged(folder / "whole") if event["ph"] == "X")
    return times, {(event["pid"], event["name"]): event["ts"] for event in spans}


def test_clocks_of_two_machines(tmp_path: Path) -> None:
    """The caller's monotonic clock says 100 s at the call."""
    clocks = Clocks(100.0, {0: [compared(0, 0.0)], 1: [compared(1, 10.0, error=0.002)]})
    times, found = on_machines(tmp_path, clocks)
    assert found == {(1000, "run"): 1e6, (1000, "add"): 2e6, (2000, "run"): 1e6, (2000, "add"): 2e6}
    whole = json.loads((tmp_path / "whole").read_text())
    assert whole["baseTimeNanoseconds"] == BEGUN * 1e9
    assert whole["clocks"] == [
        {"host": "n0", "ranks": "0", "error_ms": 0.0},
        {"host": "n1", "ranks": "1", "error_ms": 2.0},
    ]
    labels = [
        (event["pid"], event["args"]) for event in merged(tmp_path / "whole") if event["name"] == "process_labels"
    ]
    assert labels == [(2000, {"labels": "times to within 2 ms"})]
    assert (times.error, times.unknown) == (0.002, [])


def test_a_clock_that_drifts(tmp_path: Path) -> None:
    """What lies between two comparisons is as far as the time is from both; the error is the larger one."""
    seen = [compared(1, 9.0, BEGUN - 30, 0.003), compared(1, 13.0, BEGUN + 90, 0.001), compared(1, 50.0, BEGUN + 900)]
    times, found = on_machines(tmp_path, Clocks(100.0, {0: [compared(0, 0.0)], 1: seen}))
    assert found[2000, "add"] == 2e6
    assert times.of[1].error == 0.003


def test_files_of_machines_with_a_call_each_have_one_beginning(tmp_path: Path) -> None:
    """That is when all were there: what was before is left out."""
    clocks = Clocks(100.0, {0: [compared(0, 0.0)], 1: [compared(1, 10.0)]}, by_hand=True)
    _, found = on_machines(tmp_path, clocks)
    assert found == {(1000, "run"): 0.5e6, (1000, "add"): 1.5e6, (2000, "run"): 0.5e6, (2000, "add"): 1.5e6}
    early = replace(
        clocks, compared={start: [replace(seen[0], begun=BEGUN + 2)] for start, seen in clocks.compared.items()}
    )
    _, found = on_machines(tmp_path, early)
    assert found[1000, "run"] == 0


def test_a_clock_that_nobody_has_compared(tmp_path: Path) -> None:
    times, _ = on_machines(tmp_path, Clocks(100.0, {0: [compared(0, 0.0)]}))
    assert (times.unknown, times.error) == ([1], 0.0)
    times, _ = on_machines(tmp_path, Clocks(100.0, {}))
    assert times.unknown == [0, 1]
    assert {told["error_ms"] for told in times.told()} == {None}


def test_parts_that_are_compressed(tmp_path: Path) -> None:
    """As they come from other machines; one that was cut is told of."""
    packed = gzip.compress(Path(part(tmp_path, 0, of_rank(42))).read_bytes())
    path = tmp_path / "rank-0.json.gz"
    path.write_bytes(packed)
    assert write(str(tmp_path / "whole"), report(42), {0: str(path)}, compressed=False) == {}
    assert any(event["name"] == "add" for event in merged(tmp_path / "whole"))
    path.write_bytes(packed[:-60])
    assert write(str(tmp_path / "whole"), report(42), {0: str(path)}, compressed=False) == {0: "it ends too early"}
