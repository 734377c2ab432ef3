"""What programs read of a launch that failed, or went well: each kind of failure by a real one, against the schema."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlaunch import LaunchError, Ranks, errors, launcher
from tests import schema

HERE = os.path.basename(__file__)


def fail(how: str) -> object:
    """Rank 1 fails so, while rank 0 waits for it."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        if how == "raised":
            raise ValueError("boom")
        if how == "out_of_memory":
            raise MemoryError("no room")
        if how == "not_picklable":
            return threading.Lock()
        if how == "exited":
            os._exit(3)
        if how == "killed":
            ctypes.string_at(0)
        threading.Event().wait()
    dist.barrier()
    return None


def failure_of(how: str, **options: object) -> dict[str, object]:
    with pytest.raises((LaunchError, ValueError, MemoryError)) as caught:
        launcher(fail, 2, device_type="cpu", **options)(how)  # type: ignore[call-overload]
    found = json.loads(json.dumps(errors.as_dict(caught.value)))
    schema.check(found, "failure")
    report = errors.report_of(caught.value)
    assert report is not None
    assert found == json.loads(json.dumps(report.as_dict()))
    assert pickle.loads(pickle.dumps(report)).as_dict() == report.as_dict()
    assert (found["kind"], found["rank"], found["function"]) == (report.kind, 1, "fail()")
    return found


@pytest.mark.parametrize("how", ["raised", "out_of_memory", "not_picklable", "exited", "killed"])
def test_a_rank_that_fails(how: str) -> None:
    found = failure_of(how)
    assert (found["kind"], found["failures"][0]["rank"]) == (how, 1)  # type: ignore[index]
    if how == "raised":
        assert found["exception"] == {"type": "ValueError", "text": "boom"}
        assert (found["device"], found["phase"], found["host"]) == ("cpu", "running the function", os.uname().nodename)
    if how in {"raised", "killed"}:
        theirs = [frame for frame in found["frames"] if not frame["library"]]  # type: ignore[attr-defined]
        assert [(os.path.basename(frame["file"]), frame["function"]) for frame in theirs] == [(HERE, "fail")]
    if how == "killed":
        assert found["exitcode"] == -signal.SIGSEGV


def test_a_deadline_names_who_is_late() -> None:
    """As values, not in the text alone: the rank for which the others wait comes first."""
    found = failure_of("late", deadline=2)
    assert found["kind"] == "deadline"
    late = [(one["rank"], one["consequence"]) for one in found["failures"]]  # type: ignore[attr-defined]
    assert sorted(rank for rank, _ in late) == [0, 1]
    assert late in ([(1, False), (0, True)], [(0, False), (1, False)])  # on a busy machine nobody may wait yet
    assert found["waited_for"] == ([1] if late[0][0] == 1 else [])


def test_programs_need_only_import_the_package() -> None:
    """As docs/for_programs.rst has it: nothing else has imported the module before."""
    asked = "import mlaunch; print(mlaunch.errors.as_dict(ValueError('mine'))['kind'])"
    assert subprocess.check_output([sys.executable, "-c", asked], text=True) == "failed\n"


def test_what_was_not_started(tmp_path: Path) -> None:
    file = str(tmp_path / "file")
    Path(file).touch()
    for wrong in (
        {"n_gpus": 0}, {"no_such": 1}, {"device_type": "no such"},
        {"log_dir": file}, {"events": f"{file}/events"}, {"profile": f"{file}/trace.json"},
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError, OSError)) as caught:
            launcher(fail, **wrong)("")  # type: ignore[call-overload]
        found = errors.as_dict(caught.value)
        schema.check(found, "failure")
        assert (found["kind"], found["retry"]) == ("misuse", False)
    interrupt = errors.as_dict(KeyboardInterrupt())
    schema.check(interrupt, "failure")
    assert (interrupt["kind"], interrupt["text"]) == ("interrupted", "KeyboardInterrupt")
    assert errors.as_dict(LaunchError("no fork server"))["kind"] == "not_started"
    assert errors.as_dict(ZeroDivisionError("mine"))["kind"] == "failed"


def test_reports_and_ranks_that_are_lost() -> None:
    with Ranks(n_gpus=1, restart=False) as ranks:
        ranks.run(int)
        schema.check(json.loads(json.dumps(ranks.last.as_dict())), "report")  # type: ignore[union-attr]
        with pytest.raises(LaunchError) as caught:
            ranks.run(os._exit, 3)
        found = errors.as_dict(caught.value)
        schema.check(found, "failure")
        assert (found["kind"], found["exitcode"]) == ("exited", 3)
        with pytest.raises(LaunchError) as caught:
            ranks.run(int)
        assert errors.as_dict(caught.value)["kind"] == "lost"
