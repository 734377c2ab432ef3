"""The caller's settings that are no variables are its ranks', whichever way the ranks come to be."""

from __future__ import annotations

import importlib
import locale
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlaunch import Ranks, launcher
from tests import launches
from tests.contract.preparing import prepared, preparing

BACKENDS = torch.backends


def change_umask() -> None:
    os.umask(0o077)


def change_limits() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


def filter_warnings() -> None:
    warnings.filterwarnings("error", message="something of (mine|yours)")


CHANGES: dict[str, Callable[[], object]] = {
    "umask": change_umask,
    "limits": change_limits,
    "affinity": lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    "slack": lambda: launches.set_timer_slack(70_000),
    "score": lambda: Path("/proc/self/oom_score_adj").write_text("1000"),
    "locale": lambda: locale.setlocale(locale.LC_NUMERIC, "C.UTF-8"),
    "numpy": lambda: np.seterr(divide="ignore"),
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "deterministic": lambda: torch.set_deterministic_debug_mode("warn"),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "grad": lambda: torch.set_grad_enabled(False),
    "sharing": lambda: torch.multiprocessing.set_sharing_strategy("file_system"),  # type: ignore[no-untyped-call]
    "device": lambda: torch.set_default_device("meta"),
    "flags": lambda: setattr(BACKENDS.cudnn, "benchmark", True),
    "filters": filter_warnings,
}


@pytest.fixture
def as_before() -> Iterator[None]:
    """Puts all of them back."""
    before, filters = launches.settings_here(), list(warnings.filters)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_deterministic_debug_mode(0)
    torch.set_float32_matmul_precision("highest")
    torch.set_grad_enabled(True)
    torch.multiprocessing.set_sharing_strategy("file_descriptor")  # type: ignore[no-untyped-call]
    torch.set_default_device(None)
    BACKENDS.cudnn.benchmark = False
    launches.apply_settings(before)
    np.seterr(divide="warn")
    warnings.filters[:] = filters  # type: ignore[index]


def told() -> dict[str, Any]:
    found = {name: dict(launches.settings_here()).get(name) for name in CHANGES}
    return found | {
        "filters": [one for one in found["filters"] if "something of" in str(one)]
    }  # libraries have some, too


def change_all() -> None:
    before = told()
    for change in CHANGES.values():
        change()
    assert [name for name, value in told().items() if value in (before[name], None)] == []


@pytest.mark.slow
@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("way", ["call", "prepared", "stays"])
def test_the_settings_of_the_caller(way: str) -> None:
    if way == "prepared":
        with preparing():
            launcher(told, 1)()
            prepared()
            change_all()
            there = launcher(told, 1)()
    elif way == "stays":
        change_all()
        with Ranks(n_gpus=1) as ranks:
            there = ranks.run(told)
    else:
        change_all()
        there = launcher(told, 1)()
    here = told()
    assert {name: value for name, value in there[0].items() if value != here[name]} == {}


def test_a_filter_imports_no_module_and_counts_once_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel's filters name a class of IPython's, whose import took half a second of each rank."""
    (tmp_path / "warner.py").write_text("class Outer:\n    class Soon(UserWarning): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    warner = importlib.import_module("warner")

    def warn() -> bool:
        was = "warner" in sys.modules
        with pytest.raises(UserWarning, match="now"):
            warnings.warn("now", importlib.import_module("warner").Outer.Soon, stacklevel=1)
        warnings.warn("of another class", UserWarning, stacklevel=1)
        return was

    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=warner.Outer.Soon)
        assert launcher(warn, 1)() == [False]
    sys.modules.pop("warner", None)


def test_a_filter_of_the_caller_counts_before_those_of_a_rank() -> None:
    def warn() -> str:
        try:
            warnings.warn("something of yours", stacklevel=1)
        except UserWarning:
            return "raised"
        return "shown"

    with warnings.catch_warnings():
        filter_warnings()
        assert launcher(warn, 1)() == ["raised"]


def test_the_priority_of_the_thread_that_calls() -> None:
    """Linux has one for each thread, so this one need not be given back, which takes privileges."""

    def call() -> tuple[object, list[object]]:
        wanted = os.nice(1)
        return wanted, launcher(lambda: dict(launches.settings_here()).get("nice"), 1)()

    with ThreadPoolExecutor(1) as pool:
        wanted, there = pool.submit(call).result()
    assert there == [wanted]


@pytest.mark.slow
def test_temporary_files_go_where_the_environment_says(tmp_path: Path) -> None:
    """Also where tempfile was asked before: torch._dynamo does as it is imported."""

    def ask() -> str:
        return tempfile.gettempdir()

    ask()
    assert launcher(ask, 1, start_method="fork", env={"TMPDIR": str(tmp_path)})() == [str(tmp_path)]
    assert launcher(ask, 1, start_method="fork")() == [ask()]


def test_a_time_zone_that_was_set_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def hour() -> str:
        return time.strftime("%H %Z", time.localtime(0))

    for zone in ("UTC", "Asia/Tokyo"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert launcher(hour, 1)() == [hour()]
    assert launcher(hour, 1, env={"TZ": "UTC"})() == ["00 UTC"]
    monkeypatch.undo()
    time.tzset()
