"""The exit statuses of ``mlaunch run``, by the kind of a failure, and what programs read of running launches."""

from __future__ import annotations

import pytest

from mlaunch import LaunchError
from mlaunch.base.exceptions import RankFailure
from mlaunch.cli import launch_commands
from mlaunch.run.command.ending import status_of
from tests import schema


@pytest.mark.parametrize(
    ("kind", "exitcode", "status"),
    [
        ("raised", None, 1), ("raised", 3, 3), ("exited", 7, 7), ("killed", -9, 137), ("out_of_memory", -9, 52),
        ("no_progress", 1, 93), ("deadline", None, 124), ("stop_overdue", None, 124), ("stopped", None, 143),
    ],
)  # fmt: skip
def test_a_status_means_one_thing(kind: str, exitcode: int | None, status: int) -> None:
    assert status_of(LaunchError("", [RankFailure(0, 1, "", exitcode=exitcode, kind=kind)])) == status


def test_a_launch_that_an_older_version_has_started() -> None:
    """What it does not say has the usual values."""
    told = launch_commands.data_of({"id": "3f2a", "ranks": [{"rank": 0, "pid": 7}]})
    schema.check(told, "launch")
    assert (told["function"], told["ranks"][0]["device"]) == ("", "-")
