"""What ``mlaunch doctor`` finds, and says of it."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlaunch.cli import doctor, main


def test_launches_that_fail_are_a_problem(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="its ranks need torch")

    def broken() -> dict[str, Any]:
        raise OSError("no torch today")

    monkeypatch.setattr(doctor, "_look_around", broken)
    assert main(["doctor"]) == 1
    assert "problem  launch       two ranks on CPUs failed: no torch today" in capsys.readouterr().out


def test_limits_that_are_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_bavail=16, f_frsize=2**22))
    assert doctor._shared_memory().text.startswith("only 64.0 MiB free: DataLoader workers and NCCL use it")
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (64, 64))
    finding = doctor._open_files()
    assert finding.state == "problem"
    assert finding.text.startswith(
        "64 (hard limit 64): 16 ranks need about 159 open files, and this process may have 64"
    )


@pytest.mark.parametrize(("limit", "state"), [("max", "ok"), (str(2**20), "note"), (str(2**59), "ok")])
def test_a_limit_on_memory(limit: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is more than there is limits nothing."""
    (tmp_path / "limit").write_text(limit)
    monkeypatch.setattr(doctor, "_LIMITS", (str(tmp_path / "none"), str(tmp_path / "limit")))
    finding = doctor._memory()
    assert (finding.state, "the cgroup allows 1.0 MiB" in finding.text) == (state, state == "note")


def test_a_name_that_means_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "myself")
    monkeypatch.setattr(socket, "gethostbyname", lambda _name: "127.0.1.1")
    assert "this host's name myself means 127.0.1.1 here: give other machines" in doctor._network().text


@pytest.mark.parametrize(
    ("found", "state", "text"),
    [
        ({"accelerator": None}, "ok", "this torch is built for CPUs only"),
        ({"accelerator": "cuda", "devices": 0}, "note", "0 cuda visible; CUDA 13, NCCL 2.27"),
        ({"accelerator": "cuda", "devices": 2, "error": "RuntimeError: no driver"}, "problem",
         "2 cuda visible; CUDA 13, NCCL 2.27; RuntimeError: no driver"),
    ],
)  # fmt: skip
def test_devices(found: dict[str, Any], state: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    finding = doctor._devices({"versions": "CUDA 13, NCCL 2.27", "error": "", "devices": 0, **found})
    assert (finding.state, finding.text) == (state, text)
