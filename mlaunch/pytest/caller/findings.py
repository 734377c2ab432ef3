"""What the ranks of tests are told as they begin, and what is heard of a test that has ended their call."""

from __future__ import annotations

import itertools
import os
import textwrap
from typing import Any

import pytest

from mlaunch.base.exceptions import LaunchError, LaunchTimeout
from mlaunch.base.frames import mentions_bottom
from mlaunch.pytest.caller import coverage_plan, fixture_transfer
from mlaunch.pytest.rank import run_test
from mlaunch.pytest.wire import rank_barrier
from mlaunch.pytest.wire.rank_tests import Beginning, Findings, RankTest, Verdict


def beginning_of(config: pytest.Config, size: int, board: int, log: int) -> Beginning:
    """Returns what new ranks are told. ``board``, ``log``: descriptors of this process."""
    ini = None if config.inipath is None else str(config.inipath)
    # By path: ranks are forks of another process, and have none of our descriptors.
    here = f"/proc/{os.getpid()}/fd"
    return Beginning(
        str(config.invocation_params.dir),
        str(config.rootpath),
        ini,
        fixture_transfer.plain_options(config),
        fixture_transfer.flags(config),
        fixture_transfer.settings(config),
        fixture_transfer.explaining(config),
        f"{here}/{board}",
        f"{here}/{log}",
        size,
        coverage_plan.plan(config),
        _is_colored(config),
    )


def _is_colored(config: pytest.Config) -> bool:
    """True if pytest's terminal shows colours."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    return reporter is not None and bool(reporter._tw.hasmarkup)


def findings_of(error: Exception, report: LaunchError, test: RankTest, size: int, log: int, after: str) -> Findings:
    """Returns what is known of a test whose call has failed.

    ``report``: of the launch; ``after``: what happens next, for the report of the test.
    """
    found = {rank: value for rank, value in report.results.items() if isinstance(value, Verdict)}
    text = str(report).replace("run_test()", test.name)
    apart = isinstance(error, run_test.EndedAloneError)
    told = text.partition("\nmeanwhile:\n")[2] if apart else text
    stacks = {rank: _of_the_test(text) for rank, text in report.stacks.items()}
    stacks = stacks if isinstance(error, LaunchTimeout) else {}
    verdicts = {**found, **rank_barrier.take(log)}
    return Findings(size, verdicts, f"{textwrap.dedent(told)}\n{after}".strip(), report.as_dict(), apart, stacks)


def _of_the_test(stack: str) -> str:
    """Returns a stack without what is below the test."""
    lines = stack.splitlines()
    return "\n".join(itertools.takewhile(lambda line: not mentions_bottom(line), lines))
