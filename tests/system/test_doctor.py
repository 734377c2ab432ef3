"""``mlaunch doctor``."""

from __future__ import annotations

import json

import pytest

from tests import launches, schema


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
        "numa",
        "torch",
        "devices",
        "launch",
    ]
    assert "two ranks on CPUs: " in told
    assert launches.command("doctor", "--json") == 0
    findings = json.loads(capsys.readouterr().out)
    for finding in findings:
        schema.check(finding, "finding")
    states = [finding["state"] for finding in findings]
    assert len(states) == len(names)
    assert set(states) <= {"ok", "note"}
