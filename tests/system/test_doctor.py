"""``mlaunch doctor``."""

from __future__ import annotations

import json

import pytest

from tests import launches


@pytest.mark.slow
def test_a_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert launches.command("doctor") == 0
    told = capsys.readouterr().out
    names = [line.split()[1] for line in told.splitlines()]
    assert names == [
        "mlaunch",
        "kernel",
        "cpus",
        "memory",
        "/dev/shm",
        "open",
        "mlaunch",
        "network",
        "torch",
        "devices",
        "launch",
    ]
    assert "two ranks on CPUs: " in told
    assert launches.command("doctor", "--json") == 0
    states = [finding["state"] for finding in json.loads(capsys.readouterr().out)]
    assert len(states) == len(names)
    assert set(states) <= {"ok", "note"}
