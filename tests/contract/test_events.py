"""``events=``: a program hears what a launch does as it happens, against the schema."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from mlaunch import Ranks, launcher
from tests import schema
from tests.system.commands import run, write


def fail_once() -> str:
    import torch.distributed as dist

    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if attempt == "0" and dist.get_rank() == 1:
        raise ValueError("not yet")
    return attempt


def check(events: list[dict[str, Any]]) -> None:
    """Fail unless these are the events of ``fail_once`` on two ranks."""
    for event in events:
        schema.check(event, "event")
    kinds = [event["event"] for event in events if event["event"] != "rank"]
    assert kinds == ["launch", "failure", "end", "restart", "launch", "end"]
    assert [event["at"] for event in events] == sorted(event["at"] for event in events)
    first, second = {event["launch"] for event in events if event["launch"]}
    for launch in (first, second):
        of_ranks = [event for event in events if event["event"] == "rank" and event["launch"] == launch]
        assert {event["host"] for event in of_ranks} == {os.uname().nodename}
        assert sorted((event["rank"], event["state"]) for event in of_ranks) == [
            (0, "ended"), (0, "started"), (1, "ended"), (1, "started"),
        ]  # fmt: skip
    failure = next(event["failure"] for event in events if event["event"] == "failure")
    assert (failure["kind"], failure["rank"]) == ("raised", 1)
    assert [event["ok"] for event in events if event["event"] == "end"] == [False, True]


def test_a_function_hears_of_each() -> None:
    events: list[dict[str, Any]] = []
    with pytest.warns(RuntimeWarning, match="is started again"):
        assert launcher(fail_once, 2, device_type="cpu", max_restarts=1, events=events.append)() == ["1", "1"]
    check(json.loads(json.dumps(events)))


@pytest.mark.slow
def test_a_file_gets_a_line_of_each(tmp_path: Path) -> None:
    """Behind what other launches have written."""
    (tmp_path / "events.jsonl").write_text("{}\n")
    script = write(tmp_path, f"import sys\nsys.path.insert(0, {os.getcwd()!r})\nimport torch.distributed as dist\n"
                   "dist.init_process_group('gloo')\nfrom tests.contract.test_events import fail_once\n"
                   "fail_once()\n")  # fmt: skip
    flags = ("--nproc-per-node", "2", "--max-restarts", "1", "--events", "events.jsonl")
    done = run(tmp_path, *flags, script)
    assert done.returncode == 0, done.stderr
    first, *lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert first == "{}"
    check([json.loads(line) for line in lines])


def test_a_stall_is_an_event() -> None:
    events: list[dict[str, Any]] = []

    def wait() -> None:
        import mlaunch

        mlaunch.stopping()  # which is progress, once
        threading.Event().wait()

    with pytest.raises(RuntimeError, match="made no progress"):
        launcher(wait, 1, device_type="cpu", stall="0.2 stop", events=events.append)()
    stall, failure = (next(event for event in events if event["event"] == kind) for kind in ("stall", "failure"))
    schema.check(stall, "event")
    assert (failure["failure"]["kind"], events.index(stall) < events.index(failure)) == ("stalled", True)
    assert stall["text"] in failure["failure"]["text"]
    assert stall["waited_for"] == failure["failure"]["waited_for"]


def test_an_agreed_stop_is_an_event() -> None:
    events: list[dict[str, Any]] = []

    def train(caller: int) -> str:
        import mlaunch

        for step in itertools.count(1):
            if step == 2:
                os.kill(caller, signal.SIGUSR1)
            if reason := mlaunch.stopping():
                return reason
        raise AssertionError

    assert launcher(train, 1, device_type="cpu", stop_on="USR1", events=events.append)(os.getpid()) == ["USR1"]
    (stop,) = [event for event in events if event["event"] == "stop"]
    schema.check(stop, "event")
    assert (stop["reason"], stop["step"] > 1, stop["asked"] <= stop["at"]) == ("USR1", True, True)


def test_a_function_that_raises_ends_no_launch(caplog: pytest.LogCaptureFixture) -> None:
    def heard(event: dict[str, Any]) -> None:
        raise KeyError(event["event"])

    assert launcher(int, 1, device_type="cpu", events=heard)() == [0]
    assert [record.message for record in caplog.records] == [
        "events=: KeyError: 'launch'. The launch continues, and its later events are dropped"
    ]


def test_spans_of_opentelemetry() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed (extra: otel)")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    with pytest.warns(RuntimeWarning, match="is started again"):
        assert launcher(fail_once, 2, device_type="cpu", max_restarts=1, events="otel")() == ["1", "1"]
    failed, went_well = exporter.get_finished_spans()
    assert [span.name for span in (failed, went_well)] == ["mlaunch fail_once()"] * 2
    assert (failed.status.is_ok, went_well.status.is_ok) == (False, True)
    told = {event.name: event.attributes for event in failed.events}
    assert [told["failure"][f"mlaunch.{name}"] for name in ("kind", "rank")] == ["raised", 1]
    assert [event.name for event in went_well.events][:2] == ["restart", "launch"]


def test_what_is_no_listener(tmp_path: Path) -> None:
    for wrong, kind, words in (
        (3, TypeError, r"events=3: allowed: a function, the path of a file, 'otel', or None"),
        ("", ValueError, r"events='': allowed: a function"),
        (
            str(tmp_path / "no" / "file"),
            OSError,
            r"events='.*/no/file' cannot be opened \(No such file or directory\); give",
        ),
    ):
        with pytest.raises(kind, match=words):
            launcher(int, 1, device_type="cpu", events=wrong)()  # type: ignore[arg-type]
    with (
        pytest.raises(ValueError, match=r"events .*tells of ranks that begin and end with a call"),
        Ranks(n_gpus=1, events=print),
    ):
        pass
