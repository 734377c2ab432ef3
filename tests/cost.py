"""What tests cost: the CPU seconds of each, with those of all processes that it started (``pytest --cost``).

Each process that runs tests is in a control group of its own, which has the time of every process below it, also of
those that nobody waited for. Where no group can be made, what was waited for is counted.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

PROPERTY, REASON = "cpu_seconds", "dear"
DEAREST = 10
DEAR = 5.0  # CPU seconds
# Where a control group has its CPU time: of version 1, and, with no controller's name, of version 2.
_FILES = {"cpuacct": ("/sys/fs/cgroup/cpuacct", "cpuacct.usage"), "": ("/sys/fs/cgroup", "cpu.stat")}


class CpuClock:
    """The CPU time of this process and of all that it starts."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._before: Path | None = None
        with contextlib.suppress(OSError):  # who may make no group, or where there are none
            self._enter()

    def _enter(self) -> None:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            kind = "cpuacct" if "cpuacct" in controllers.split(",") else controllers
            if kind not in _FILES:
                continue
            root, name = _FILES[kind]
            above = Path(f"{root}{path}")
            if (above / name).exists():
                group = above / f"mlaunch-tests-{os.getpid()}"
                group.mkdir()
                (group / "cgroup.procs").write_text(str(os.getpid()))
                self._file, self._before = group / name, above
                return

    def seconds(self) -> float:
        """Return the CPU seconds until now."""
        if self._file is None:
            used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
            return sum(one.ru_utime + one.ru_stime for one in used)
        text = self._file.read_text()
        return int(text) / 1e9 if text.strip().isdigit() else int(text.split()[1]) / 1e6

    def close(self) -> None:
        """Leave the group, and remove it unless a process of a test is still in it."""
        if self._before is not None and self._file is not None:
            (self._before / "cgroup.procs").write_text(str(os.getpid()))
            with contextlib.suppress(OSError):
                self._file.parent.rmdir()


class Cost:
    """Notes each test's CPU seconds, and shows the sum and what is dearest."""

    def __init__(self, config: pytest.Config) -> None:
        self._clock = CpuClock()
        self._started = 0.0
        self._spent: dict[str, float] = {}
        self._reasons: dict[str, str] = {}
        config.add_cleanup(self._clock.close)

    def pytest_runtest_logstart(self) -> None:
        self._started = self._clock.seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add a test's time to its last report, which goes to the process that shows it."""
        report = yield
        if call.when == "teardown":
            report.user_properties.append((PROPERTY, round(self._clock.seconds() - self._started, 3)))
            if (mark := item.get_closest_marker("dear")) is not None:
                report.user_properties.append((REASON, str(mark.args[0])))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            said: dict[str, Any] = dict(report.user_properties)
            self._spent[report.nodeid] = said[PROPERTY]
            self._reasons[report.nodeid] = said.get(REASON, "it does not say why")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._spent:
            return
        files: dict[str, float] = defaultdict(float)
        for test, seconds in self._spent.items():
            files[test.split("::")[0]] += seconds
        terminalreporter.section(f"{sum(files.values()):.0f} CPU seconds")
        for name, seconds in sorted(files.items(), key=lambda item: -item[1])[:DEAREST]:
            terminalreporter.write_line(f"{seconds:7.1f}  {name}")
        terminalreporter.write_line(f"Tests of more than {DEAR:.0f}, and why:")
        for name, seconds in sorted(self._spent.items(), key=lambda item: -item[1]):
            if seconds > DEAR:
                terminalreporter.write_line(f"{seconds:7.1f}  {name}: {self._reasons[name]}")
