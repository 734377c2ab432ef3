"""``mlaunch doctor --report``."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlaunch.cli import bug_report, doctor, main

ENVIRON = {
    "HOME": "/home/ada",
    "MLAUNCH_TOKEN": "hushhush",
    "HF_API_KEY": "hf_hidden",
    "SLURM_JWT": "eyJhbGci",
    "NCCL_DEBUG": "INFO",
    "MY_NOTES": "private matters",
    "PYTHONPATH": "/home/ada/lib:/home/adam",
}


def report(environ: dict[str, str], failure: str | None = None) -> str:
    return "\n".join(bug_report.write(iter(["ok cpus"]), environ, failure))


def test_a_report_holds_what_helps_and_no_secret() -> None:
    told = report(ENVIRON)
    for wanted in (
        "\nmlaunch ",
        "\nok cpus\n",
        "\nopen files: ",
        "\nNCCL_DEBUG=INFO\n",
        "\nPYTHONPATH=~/lib:/home/adam\n",
        "\nMLAUNCH_TOKEN is set, and not shown\n",
        "print(train.last)",
    ):
        assert wanted in told
    for hidden in ("hushhush", "hf_hidden", "eyJhbGci", "private matters"):
        assert hidden not in told


def test_output_of_a_call_is_added_without_secrets(tmp_path: Path) -> None:
    failure = tmp_path / "failure.txt"
    failure.write_text("ValueError: hf_hidden in /home/ada/x.py at https://ada:pw@host/x\n" + "x\n" * 100_000 + "end")
    told = report(ENVIRON, str(failure))
    assert "\nValueError: (HF_API_KEY) in ~/x.py at https://(login)@host/x\n" in told
    assert "\nend\n" in told
    assert len(told) < 80_000


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: iter([doctor.Finding("launch", doctor.PROBLEM, "no torch")]))
    assert main(["doctor", "--report"]) == 1
    assert "\nproblem  launch       no torch\n" in capsys.readouterr().out
    assert main(["doctor", "--report", str(tmp_path / "none")]) == 1
    told = capsys.readouterr()
    assert (told.out, "No such file" in told.err) == ("", True)
