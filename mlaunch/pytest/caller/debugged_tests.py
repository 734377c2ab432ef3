"""Tests on ranks under ``--pdb`` and ``--trace``: each is a launch of its own, whose ranks have a prompt here.

pytest's own prompt would open in pytest's process, which does not run the test.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from mlaunch.base.exceptions import report_of
from mlaunch.caller.launcher import launcher
from mlaunch.pytest.caller import early_server, xdist_workers
from mlaunch.pytest.caller.beginning import beginning_of
from mlaunch.pytest.caller.judgement import findings_of
from mlaunch.pytest.caller.mark import Shape
from mlaunch.pytest.rank.run_test import DebuggedTest
from mlaunch.pytest.wire import rank_barrier
from mlaunch.pytest.wire.rank_tests import Findings, RankTest

_AFTER = "pytest's --pdb: each test has ranks of its own"
_PROMPT = "pdbinvoke"  # pytest's plugin
DEBUGGED = pytest.StashKey[bool]()  # True for a test whose ranks had a prompt


class Debugging:
    """How a session runs tests on ranks that are debugged."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._traced = bool(config.getoption("trace"))
        self.wanted = (self._traced or bool(config.getoption("usepdb"))) and self._somebody_is_there()
        if self.wanted and (plugin := config.pluginmanager.get_plugin(_PROMPT)) is not None:
            config.pluginmanager.unregister(plugin)
            config.pluginmanager.register(_PromptElsewhere(plugin), _PROMPT)

    def _somebody_is_there(self) -> bool:
        with self._shown():
            return sys.stdin.isatty() and sys.stdout.isatty()

    def run(self, item: pytest.Item, shape: Shape, test: RankTest, deadline: float) -> Findings:
        """Run a test; return what its ranks have found. ValueError: this machine does not have its devices."""
        item.stash[DEBUGGED] = True
        place = xdist_workers.WorkerDevices(shape, deadline)
        board, log = rank_barrier.new_files(shape.size)
        beginning = beginning_of(self._config, shape.size, board, log)
        early_server.prepare()
        try:
            with self._shown():
                run = launcher(
                    DebuggedTest(beginning, test, traced=self._traced),
                    shape.size,
                    devices=place.devices,
                    device_type=shape.device_type,
                    backend=shape.backend,
                    numa=shape.numa,
                    numa_memory=shape.numa_memory,
                    deadline=deadline,
                    progress=False,
                    debug=True,
                    env={**xdist_workers.share_of_cores(shape.size), **place.environ},
                )
                return Findings(shape.size, dict(enumerate(run())))
        except Exception as error:
            report = report_of(error)
            if report is None:
                raise
            return findings_of(error, report, test, shape.size, log, _AFTER)
        finally:
            place.close()
            os.close(board)
            os.close(log)

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        """Take the terminal, as pytest's own prompt does: nothing is captured meanwhile."""
        capturing: Any = self._config.pluginmanager.get_plugin("capturemanager")
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if capturing is not None:
            capturing.suspend(in_=True)
        if terminal is not None:
            terminal.ensure_newline()
        try:
            yield
        finally:
            if capturing is not None:
                capturing.resume()


class _PromptElsewhere:
    """In place of pytest's plugin that opens a prompt at a failure: not after a prompt in a rank."""

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin
        self.pytest_internalerror = plugin.pytest_internalerror

    def pytest_exception_interact(self, node: Any, call: pytest.CallInfo[Any], report: Any) -> None:
        """Open pytest's prompt, unless a rank had one."""
        if call.when != "call" or not node.stash.get(DEBUGGED, False):
            self._plugin.pytest_exception_interact(node, call, report)
