"""``tests/gpu/run``, which tries a machine with GPUs: here with an accelerator without hardware."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import toy
from tests.conftest import ROOT
from tests.gpu.__main__ import Part, parts, report, run

pytestmark = pytest.mark.slow


def gpu_run(cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "tests" / "gpu" / "run"), *args]
    environ = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, encoding="utf-8", timeout=300, check=False
    )


@pytest.mark.nightly
@pytest.mark.skipif(not toy.is_possible(), reason="this torch takes no accelerator written in Python")
def test_parts_on_an_accelerator_without_hardware(tmp_path: Path) -> None:
    done = gpu_run(tmp_path, "--without-gpu", "--parts", "tests,ports,prepared,queued,returned")
    text = (tmp_path / "gpu.txt").read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests passed; returned passed; ports passed; prepared passed; queued passed." in text
    assert "3 passed" in text
    assert "yes: no device is open in prepared ranks" in text


@pytest.mark.skipif(not toy.is_possible(), reason="this torch takes no accelerator written in Python")
def test_parts_that_the_time_does_not_suffice_for(tmp_path: Path) -> None:
    done = gpu_run(tmp_path, "there.txt", "--without-gpu", "--minutes", "0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "tests not run; late not run; " in (tmp_path / "there.txt").read_text()


def test_a_wrong_command_line(tmp_path: Path) -> None:
    done = gpu_run(tmp_path, "--without-gpu", "--parts", "ports,nonesuch")
    assert done.returncode == 2
    assert "--parts nonesuch: there are tests, late, eager, returned, endless, " in done.stderr


def test_a_part_that_hangs_is_ended() -> None:
    part = Part("hangs", "What hangs", 60, ["-c", "import signal; print('begun', flush=True); signal.pause()"])
    outcome = run(part, 1, dict(os.environ))
    assert (outcome.word, outcome.text) == ("FAILED: not over after 1 s", "begun\n")


def test_the_text_has_what_documentation_takes() -> None:
    words = "print('figure: a call 1 ms'); print('x\\n' * 200); raise SystemExit(3)"
    outcome = run(Part("one", "The first", 60, ["-c", words]), 60, dict(os.environ))
    text = report("a machine", [outcome], ["two"])
    assert "a machine: one FAILED (exit code 3); two not run." in text
    assert "\na call 1 ms\n" in text
    assert "lines before)" in text
    assert all(part.seconds <= 420 for part in parts(without_gpu=False))
